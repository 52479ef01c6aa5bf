#include "binding/file_name.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"
#include "binding/python.h"

namespace nvme_ops {
namespace {

// The folder that a relative path starts from; empty where it cannot be found, which opening the path will report.
std::string folder_now() {
  char folder[PATH_MAX];
  return ::getcwd(folder, sizeof folder) != nullptr && folder[0] == '/' ? std::string(folder) + "/" : std::string();
}

}  // namespace

bool is_descriptor(PyObject* object) {
  return PyLong_Check(object) && !PyBool_Check(object);
}

bool is_file(PyObject* object) {
  return is_descriptor(object) || PyUnicode_Check(object) || PyBytes_Check(object) ||
         PyObject_HasAttrString(object, "__fspath__") == 1;
}

FileName::FileName(PyObject* object) {
  if (is_descriptor(object)) {
    int overflow = 0;
    const long fd = PyLong_AsLongAndOverflow(object, &overflow);
    if (overflow != 0 || fd < 0 || fd > INT32_MAX) {
      raise(bad_argument("a file descriptor must lie between 0 and 2**31 - 1"));
    }
    fd_ = static_cast<int>(fd);
    return;
  }
  PyObject* encoded = nullptr;
  if (PyBool_Check(object) || PyUnicode_FSConverter(object, &encoded) == 0) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw PythonError();
    PyErr_Clear();
    raise_type_error(std::string("a file must be a path or a file descriptor, not ") + Py_TYPE(object)->tp_name);
  }
  const Ref owned(encoded);
  path_.assign(PyBytes_AS_STRING(encoded), static_cast<std::size_t>(PyBytes_GET_SIZE(encoded)));
}

bool FileName::operator<(const FileName& other) const {
  return std::tie(fd_, path_) < std::tie(other.fd_, other.path_);
}

std::shared_ptr<SharedFile> FileName::share(Op op, Cache cache) const {
  if (!by_descriptor() && (path_.empty() || path_[0] == '/')) {
    return std::make_shared<SharedFile>(path_,
                                        [op, cache](const std::string& path) { return File::open(path, op, cache); });
  }
  if (!by_descriptor()) {
    return std::make_shared<SharedFile>(path_, [folder = folder_now(), op, cache](const std::string& path) {
      return File::open(folder + path, op, cache, path);
    });
  }
  const std::string shown = "file descriptor " + std::to_string(fd_);
  const auto copy = std::make_shared<UniqueFd>(::fcntl(fd_, F_DUPFD_CLOEXEC, 0));
  if (!*copy) raise(system_failure(errno, "using " + shown));
  return std::make_shared<SharedFile>(
      shown, [copy, op, cache, fd = fd_](const std::string&) { return File::adopt(copy->get(), op, cache, fd); });
}

}  // namespace nvme_ops
