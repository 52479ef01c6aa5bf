// Checks a pickle before Python's own reader reads it, which trusts every number in it.
#pragma once

#include <Python.h>

namespace nvme_ops {

// scan_pickle(content, codes) -> str. See the module's functions.
PyObject* scan_pickle(PyObject*, PyObject* arguments);

}  // namespace nvme_ops
