// Pool memory as a Python object with the buffer protocol, from which torch.frombuffer makes tensors that keep it
// alive.
#pragma once

#include <Python.h>

namespace nvme_ops {

void add_buffer_type(PyObject* module);

}  // namespace nvme_ops
