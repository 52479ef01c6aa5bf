// The asynchronous operations that a handle's wait() has to wait for.
#pragma once

#include <Python.h>

namespace nvme_ops {

// Takes `operation` out of `pending`, whatever error is on its way.
void remove_pending(PyObject* pending, PyObject* operation);

bool add_pending_type(PyObject* module);

}  // namespace nvme_ops
