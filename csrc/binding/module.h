// What the modules of all ops have in common.
#pragma once

#include <Python.h>

namespace nvme_ops {

// A module with the types Engine and Operation, whose function `shut_down` runs at exit, and that shows everything in
// `__all__` of the Python module `interface` as its own. Throws PythonError.
PyObject* make_module(PyModuleDef* definition, const char* interface);

// shut_down(): finishes all work and ends all threads.
PyObject* shut_down(PyObject*, PyObject*);

}  // namespace nvme_ops
