// Replaces torch's CPU allocator for as long as that is asked for: large tensors get memory from the buffer pool.
#pragma once

#include <Python.h>

namespace nvme_ops {

// allocate_from_pool(begin) -> bool. Begins or ends a use; False where torch's allocator cannot be replaced.
PyObject* allocate_from_pool(PyObject*, PyObject* begin);

}  // namespace nvme_ops
