// What the modules of all ops have in common.
#pragma once

#include <Python.h>

namespace nvme_ops {

// Makes a module with the types Engine and Operation, whose function `shut_down` runs at exit, and which re-exports
// everything in `__all__` of the Python module `interface`. Throws PythonError.
PyObject* make_module(PyModuleDef* definition, const char* interface);

// shut_down(): finishes all operations and ends all threads.
PyObject* shut_down(PyObject*, PyObject*);

}  // namespace nvme_ops
