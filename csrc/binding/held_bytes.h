// Keeps the bytes behind a storage for as long as a device moves them. To hold the storage is not enough: resize_(0),
// with which FSDP frees memory, and share_memory_() give its bytes away and leave the storage.
#pragma once

#include <Python.h>
#include <c10/core/Storage.h>

#include <memory>

namespace nvme_ops {

// Until the last reference goes, which must be with the GIL held, the bytes stay where they are. Where they belong to
// CPU memory that torch manages, the storage may be resized meanwhile, which then frees them at the end; else resizing
// is an error of torch's. `tensor` is any with this storage; `pooled`: its memory is the buffer pool's.
std::shared_ptr<void> hold_bytes(const c10::Storage& storage, PyObject* tensor, bool pooled);

// The deleter of a storage's bytes, also while they are held.
c10::DeleterFnPtr deleter_of(const c10::Storage& storage);

}  // namespace nvme_ops
