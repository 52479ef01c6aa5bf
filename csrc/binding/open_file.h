// A file that Python keeps open across calls: a transfer of it costs no opening, no look at its kind, no closing.
#pragma once

#include <Python.h>

#include <memory>

#include "engine/shared_file.h"

namespace nvme_ops {

bool add_open_file_type(PyObject* module);

bool is_open_file(PyObject* object);

// The file for a further call, opened when its first transfer needs it. With the GIL held. Throws IoError when it was
// closed.
std::shared_ptr<SharedFile> share_open_file(PyObject* object, Op op, Cache cache);

}  // namespace nvme_ops
