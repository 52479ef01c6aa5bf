// The asynchronous operations that a handle's wait() has to wait for.
#pragma once

#include <Python.h>

namespace nvme_ops {

// Removes `operation` from `pending`, even while a Python error is set.
void remove_pending(PyObject* pending, PyObject* operation);

void add_pending_type(PyObject* module);

}  // namespace nvme_ops
