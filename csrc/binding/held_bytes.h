// Keeps the bytes behind a storage alive while a device transfers them. Holding the storage is not enough: resize_(0),
// with which FSDP frees memory, and share_memory_() take its bytes away and leave the storage.
#pragma once

#include <Python.h>
#include <c10/core/Storage.h>

#include <memory>

namespace nvme_ops {

// The bytes stay in place until the last reference is released, with the GIL. If torch manages them, the storage may be
// resized meanwhile; otherwise torch reports that as an error. `pooled`: they are from the buffer pool.
std::shared_ptr<void> hold_bytes(const c10::Storage& storage, PyObject* tensor, bool pooled);

// Returns whether torch allocated the bytes, and can resize the storage: the buffer pool's cannot be.
bool torch_manages(const c10::Storage& storage);

// Returns the deleter of a storage's bytes, also while they are held.
c10::DeleterFnPtr deleter_of(const c10::Storage& storage);

}  // namespace nvme_ops
