// Pool memory as a Python object with the buffer protocol: torch.frombuffer makes tensors of it and frees it with them.
#pragma once

#include <Python.h>

namespace nvme_ops {

bool add_buffer_type(PyObject* module);

}  // namespace nvme_ops
