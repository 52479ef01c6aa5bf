// A file as the caller named it: a path (str, bytes or os.PathLike) or a descriptor.
#pragma once

#include <Python.h>

#include <memory>
#include <string>

#include "engine/shared_file.h"

namespace nvme_ops {

bool is_descriptor(PyObject* object);

// Whether it names one file, rather than being a sequence of names.
bool is_file(PyObject* object);

class FileName {
public:
  // Throws PythonError and IoError.
  explicit FileName(PyObject* object);

  bool by_descriptor() const { return fd_ >= 0; }
  bool operator<(const FileName& other) const;

  // To be opened when it is first needed. A relative path is one of the present folder then too, and a descriptor may
  // be closed by its owner meanwhile. Throws IoError.
  std::shared_ptr<SharedFile> share(Op op, Cache cache) const;

private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace nvme_ops
