// Many tensors in one call, for checkpoints of thousands of small ones.
#pragma once

#include <Python.h>

namespace nvme_ops {

// overlapping(tensors) -> the indices of two that share memory, or None.
PyObject* overlapping(PyObject*, PyObject* tensors);

// set_storage_offsets(tensors, offsets): moves contiguous tensors within their storages.
PyObject* set_storage_offsets(PyObject*, PyObject* arguments);

// set_parts(tensors, memory, places, lengths): gives each tensor a storage of its own, which is a part of the memory,
// and makes it one-dimensional over all of that. They keep the memory alive; none of them can be resized.
PyObject* set_parts(PyObject*, PyObject* arguments);

// set_storages(tensors, owners, offsets, sizes, strides): makes each a view of its owner's storage.
PyObject* set_storages(PyObject*, PyObject* arguments);

// deny_memory(tensor, message): whoever asks for the memory of the tensor's storage gets a RuntimeError.
PyObject* deny_memory(PyObject*, PyObject* arguments);

// share_version(tensor, other): counts changes of the other in the tensor's _version, too.
PyObject* share_version(PyObject*, PyObject* arguments);

}  // namespace nvme_ops
