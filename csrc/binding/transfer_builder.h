// A Transfer, made of the memory, the files and the offsets that one call of Python names.
#pragma once

#include <Python.h>

#include <vector>

#include "binding/memory.h"
#include "binding/operation.h"
#include "engine/tool.h"

namespace nvme_ops {

struct TransferKind {
  Op op;
  Priority priority;
  Tool tool;
  bool validate;
};

// Returns the priority of a number that Python gave. Throws IoError.
Priority priority_of(PyObject* priority);  // Demand for nullptr

// For one memory and one file; without an offset (None) a written file ends with it. Throws PythonError and IoError.
Transfer build_transfer(const TransferKind& kind, const Memory& memory, PyObject* file, PyObject* offset);

// For several memories and a file for all or for each; without offsets each is a whole file. Throws the same.
Transfer build_transfer(const TransferKind& kind, const std::vector<Memory>& memories, PyObject* files,
                        PyObject* offsets);

}  // namespace nvme_ops
