// The engine as a Python object: `async_io.Engine`.
#pragma once

#include <Python.h>

namespace nvme_ops {

bool add_engine_type(PyObject* module);

// Finishes the work of every engine and ends their threads, before the interpreter goes.
void shut_down_engines();

}  // namespace nvme_ops
