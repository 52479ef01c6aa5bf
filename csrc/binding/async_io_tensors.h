// Many tensors in one call, for checkpoints of thousands of small ones.
#pragma once

#include <Python.h>

namespace nvme_ops {

// overlapping(tensors) -> the indices of two that share memory, or None.
PyObject* overlapping(PyObject*, PyObject* tensors);

// set_storage_offsets(tensors, offsets): moves contiguous tensors within their storages.
PyObject* set_storage_offsets(PyObject*, PyObject* arguments);

}  // namespace nvme_ops
