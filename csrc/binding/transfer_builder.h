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
Priority priority_of(PyObject* priority);  // the first one of nullptr

// One memory and one file. Without an offset (None) a write makes the file end with it. Throw PythonError and IoError.
Transfer build_transfer(const TransferKind& kind, const Memory& memory, PyObject* file, PyObject* offset);

// Several memories, `files` one for all or one for each; without offsets each is a whole file.
Transfer build_transfer(const TransferKind& kind, const std::vector<Memory>& memories, PyObject* files,
                        PyObject* offsets);

}  // namespace nvme_ops
