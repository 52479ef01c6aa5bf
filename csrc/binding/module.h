// The modules of both ops, and what each file of the binding adds to them.
#pragma once

#include <Python.h>

namespace nvme_ops {

// Makes a module, which re-exports all of the Python module `interface` and runs `shut_down` at exit. May throw.
PyObject* make_module(const char* name, const char* doc, PyMethodDef* functions, const char* interface);

// shut_down(): finishes all operations and ends all threads.
PyObject* shut_down(PyObject*, PyObject*);

// `async_io.Buffer`: pool memory with the buffer protocol, for torch.frombuffer.
void add_buffer_type(PyObject* module);

// `async_io.Engine`, and functions for those who wait until memory is released.
void add_engine_type(PyObject* module);
PyObject* endings(PyObject*, PyObject*);
PyObject* note_ending(PyObject*, PyObject*);
PyObject* wait_for_ending(PyObject*, PyObject* arguments);
// Finishes the operations of every engine and ends their threads, before the interpreter exits.
void shut_down_engines();

// The asynchronous operations that a handle's wait() has to wait for.
void add_pending_type(PyObject* module);
// Removes `operation` from `pending`, even while a Python error is set.
void remove_pending(PyObject* pending, PyObject* operation);

PyObject* expand(PyObject*, PyObject* arguments);
PyObject* multiply(PyObject*, PyObject* arguments);
PyObject* quantize_states(PyObject*, PyObject* arguments);
PyObject* expand_states(PyObject*, PyObject* arguments);
PyObject* round_states(PyObject*, PyObject* arguments);
PyObject* pool_large_tensors(PyObject*, PyObject*);

// Many tensors in one call, for checkpoints of thousands of small ones.
PyObject* overlapping(PyObject*, PyObject* tensors);
PyObject* set_storage_offsets(PyObject*, PyObject* arguments);
// Each tensor becomes one-dimensional and has all of its part. They keep the memory alive and cannot be resized.
PyObject* set_parts(PyObject*, PyObject* arguments);
PyObject* set_storages(PyObject*, PyObject* arguments);

PyObject* deny_memory(PyObject*, PyObject* arguments);
PyObject* share_version(PyObject*, PyObject* arguments);

}  // namespace nvme_ops
