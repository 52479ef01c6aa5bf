// torch's allocator of CPU memory, for as long as somebody asks for it: large tensors get memory of the buffer pool.
#pragma once

#include <Python.h>

namespace nvme_ops {

// allocate_from_pool(begin) -> bool. Begins or ends a use; False where torch's allocator cannot be replaced.
PyObject* allocate_from_pool(PyObject*, PyObject* begin);

}  // namespace nvme_ops
