// Functions of the module async_io that have a file of their own; async_io.cpp says what each of them does.
#pragma once

#include <Python.h>

namespace nvme_ops {

PyObject* allocate_from_pool(PyObject*, PyObject* begin);

// Checks a pickle before Python's own reader reads it, which trusts every number in it.
PyObject* scan_pickle(PyObject*, PyObject* arguments);

// Many tensors in one call, for checkpoints of thousands of small ones.
PyObject* overlapping(PyObject*, PyObject* tensors);
PyObject* set_storage_offsets(PyObject*, PyObject* arguments);
// Each tensor is one-dimensional over all of its part. They keep the memory alive; none of them can be resized.
PyObject* set_parts(PyObject*, PyObject* arguments);
PyObject* set_storages(PyObject*, PyObject* arguments);

PyObject* deny_memory(PyObject*, PyObject* arguments);
PyObject* share_version(PyObject*, PyObject* arguments);

}  // namespace nvme_ops
