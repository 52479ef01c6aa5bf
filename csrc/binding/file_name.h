// A file as the caller named it: a path (str, bytes or os.PathLike), a descriptor, or one that is kept open: an
// OpenFile or an nvme_ops.File, which has one.
#pragma once

#include <Python.h>

#include <memory>
#include <string>

#include "binding/python.h"
#include "engine/shared_file.h"

namespace nvme_ops {

bool is_descriptor(PyObject* object);

// Whether it names one file, rather than being a sequence of names.
bool is_file(PyObject* object);

// The file that a descriptor has open, to be opened by us when it is first needed; its owner may close it meanwhile.
std::shared_ptr<SharedFile> share_descriptor(int fd, Op op, Cache cache);

class FileName {
public:
  // Throws PythonError and IoError.
  explicit FileName(PyObject* object);

  // Not by a path: then a tensor is never the whole file, which would be cut to it.
  bool is_open() const { return fd_ >= 0 || open_; }
  bool operator<(const FileName& other) const;

  // To be opened when it is first needed. A relative path is one of the present folder then too, and a descriptor may
  // be closed by its owner meanwhile. Throws IoError.
  std::shared_ptr<SharedFile> share(Op op, Cache cache) const;

private:
  std::string path_;
  int fd_ = -1;
  Ref open_;  // an OpenFile
};

}  // namespace nvme_ops
