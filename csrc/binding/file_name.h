// A file as the caller named it: a path, a descriptor, an OpenFile, or an nvme_ops.File, which has one.
#pragma once

#include <Python.h>

#include <memory>
#include <string>

#include "binding/python.h"
#include "engine/shared_file.h"

namespace nvme_ops {

bool is_descriptor(PyObject* object);

// Returns whether it names one file, rather than being a sequence of names.
bool is_file(PyObject* object);

// Returns the file behind a descriptor, to be reopened when it is first needed; its owner may close `fd` meanwhile.
std::shared_ptr<SharedFile> share_descriptor(int fd, Op op, Cache cache);

class FileName {
public:
  // Throws PythonError and IoError.
  explicit FileName(PyObject* object);

  // True for anything but a path: then a write never truncates the file to the tensor.
  bool is_open() const { return fd_ >= 0 || open_; }
  bool operator<(const FileName& other) const;

  // Opened when first needed: until then the folder may change, and a descriptor be closed. Throws IoError.
  std::shared_ptr<SharedFile> share(Op op, Cache cache) const;

private:
  std::string path_;
  int fd_ = -1;
  Ref open_;  // an OpenFile
};

}  // namespace nvme_ops
