#include "binding/open_file.h"

#include <map>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "binding/file_name.h"
#include "binding/python.h"

namespace nvme_ops {
namespace {

// The SharedFiles of an open file. Each is claimed, so that it stays open once a transfer has opened it.
struct Files {
  int fd = -1;  // the owner's; a forked child reopens the file through it
  bool padded = false;
  unsigned long generation = fork_generation();
  std::map<std::pair<Op, Cache>, std::shared_ptr<SharedFile>> by_use;

  // Closes the files; returns errno if that reports a failed write. Closing may take long on a network file system.
  int close() {
    const auto ending = std::exchange(by_use, {});
    const WithoutGil released;
    int error = 0;
    for (const auto& [use, file] : ending) {
      const int failed = file->end_claim();
      if (use.first == Op::Write && failed != 0) error = failed;
    }
    return error;
  }
};

PyTypeObject* open_file_type = nullptr;

Files& files_of(PyObject* self) {
  Files*& files = held<Files>(self);
  if (files->generation != fork_generation()) {
    const Files& before = *files;
    files = new Files;  // the parent's stays as it is: its locks may be held
    files->fd = before.fd;
    files->padded = before.padded;
  }
  return *files;
}

PyObject* open_file_create(PyTypeObject* type, PyObject* arguments) {
  int fd, padded = 0;
  parse(arguments, "i|p", &fd, &padded);
  auto files = std::make_unique<Files>();
  files->fd = fd;
  files->padded = padded != 0;
  return new_holder(type, std::move(files));
}

void open_file_deallocate(PyObject* self) {
  files_of(self).close();
  free_holder<Files>(self);
}

PyObject* close(PyObject* self, PyObject*) {
  Files& files = files_of(self);
  const std::string path = files.by_use.empty() ? std::string() : files.by_use.begin()->second->path();
  files.fd = -1;
  if (const int error = files.close()) raise(system_failure(error, "closing the file", path));
  Py_RETURN_NONE;
}

// For the other op, which reopens the file through it.
PyObject* fileno(PyObject* self, PyObject*) {
  return PyLong_FromLong(files_of(self).fd);
}

PyObject* itself(PyObject* self, void*) {
  Py_INCREF(self);
  return self;
}

PyGetSetDef open_file_properties[] = {{"_open_file", itself, nullptr, "Itself, as for an nvme_ops.File.", nullptr},
                                      {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef open_file_methods[] = {
    {"fileno", method<fileno>, METH_NOARGS, "The descriptor that it was made from."},
    {"close", method<close>, METH_NOARGS, "Closes it after its transfers; raises a failed close."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_open_file_type(PyObject* module) {
  open_file_type = add_type(module, "nvme_ops.OpenFile", sizeof(Holder<Files>),
                            "OpenFile(fd, padded=False). A file that stays open. "
                            "Padded: writes may overwrite the rest of their last page.",
                            constructor<open_file_create>, open_file_deallocate, open_file_methods,
                            {{Py_tp_getset, open_file_properties}});
}

bool is_open_file(PyObject* object) {
  return Py_TYPE(object) == open_file_type;
}

std::shared_ptr<SharedFile> share_open_file(PyObject* object, Op op, Cache cache) {
  Files& files = files_of(object);
  if (files.fd < 0) raise(bad_argument("the file is closed"));
  const auto known = files.by_use.find({op, cache});
  if (known != files.by_use.end()) {
    known->second->distrust_size();
    return known->second;
  }
  std::shared_ptr<SharedFile> file = share_descriptor(files.fd, op, cache);
  if (files.padded) file->pad();
  file->claim();
  files.by_use.emplace(std::pair(op, cache), file);
  return file;
}

}  // namespace nvme_ops
