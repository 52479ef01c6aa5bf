// The engine as a Python object: `async_io.Engine`.
#pragma once

#include <Python.h>

namespace nvme_ops {

void add_engine_type(PyObject* module);

// Functions of the module for those who wait until memory is released.
PyObject* endings(PyObject*, PyObject*);
PyObject* note_ending(PyObject*, PyObject*);
PyObject* wait_for_ending(PyObject*, PyObject* arguments);

// Finishes the operations of every engine and ends their threads, before the interpreter exits.
void shut_down_engines();

}  // namespace nvme_ops
