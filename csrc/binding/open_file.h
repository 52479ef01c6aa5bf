// A file that Python keeps open across calls: a transfer neither opens, inspects nor closes it.
#pragma once

#include <Python.h>

#include <memory>

#include "engine/shared_file.h"

namespace nvme_ops {

void add_open_file_type(PyObject* module);

bool is_open_file(PyObject* object);

// Returns the file for a further call. Call with the GIL held. Throws IoError once it was closed.
std::shared_ptr<SharedFile> share_open_file(PyObject* object, Op op, Cache cache);

}  // namespace nvme_ops
