#include "binding/file_name.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <tuple>

#include "base/error.h"
#include "base/fork.h"
#include "base/unique_fd.h"
#include "binding/open_file.h"

namespace nvme_ops {
namespace {

// Returns the folder that a relative path starts from; empty if it cannot be found, which opening the path will report.
std::string folder_now() {
  char folder[PATH_MAX];
  return ::getcwd(folder, sizeof folder) != nullptr && folder[0] == '/' ? std::string(folder) + "/" : std::string();
}

// Returns our own descriptor for the file behind `fd`, which the caller may close, shared by all calls in flight on it:
// descriptors are limited. It is only reopened, so any with the same flags will do. Call with the GIL held.
std::shared_ptr<UniqueFd> duplicate(int fd, const std::string& shown) {
  using Key = std::tuple<dev_t, ino_t, int, unsigned long>;
  static auto* const known = new std::map<Key, std::weak_ptr<UniqueFd>>;
  struct stat status{};
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fstat(fd, &status) < 0) raise(system_failure(errno, "using " + shown));
  const Key key{status.st_dev, status.st_ino, flags, fork_generation()};
  const auto found = known->find(key);
  if (found != known->end()) {
    if (auto copy = found->second.lock()) return copy;
  }
  for (auto entry = known->begin(); entry != known->end();) {
    entry = entry->second.expired() ? known->erase(entry) : std::next(entry);
  }
  const auto copy = std::make_shared<UniqueFd>(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!*copy) raise(system_failure(errno, "using " + shown));
  known->emplace(key, copy);
  return copy;
}

// Returns the OpenFile of an nvme_ops.File; empty for anything else.
Ref kept_open(PyObject* object) {
  if (is_open_file(object)) return Ref::borrowed(object);
  if (PyLong_Check(object) || PyUnicode_Check(object) || PyBytes_Check(object) || PyList_Check(object)) return {};
  Ref open_file(PyObject_GetAttrString(object, "_open_file"));
  if (!open_file) PyErr_Clear();
  return open_file;
}

}  // namespace

bool is_descriptor(PyObject* object) {
  return PyLong_Check(object) && !PyBool_Check(object);
}

bool is_file(PyObject* object) {
  return is_descriptor(object) || kept_open(object) || PyUnicode_Check(object) || PyBytes_Check(object) ||
         PyObject_HasAttrString(object, "__fspath__") == 1;
}

FileName::FileName(PyObject* object) {
  open_ = kept_open(object);
  if (open_ && is_open_file(open_.get())) return;
  const Ref descriptor = open_ ? checked(PyObject_CallMethod(object, "fileno", nullptr)) : Ref::borrowed(object);
  open_ = {};  // an OpenFile of the other op
  object = descriptor.get();
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
    raise_type_error(std::string("a file must be a path or a file descriptor, not ") + type_name(object));
  }
  const Ref owned(encoded);
  path_.assign(PyBytes_AsString(encoded), static_cast<std::size_t>(PyBytes_Size(encoded)));
}

bool FileName::operator<(const FileName& other) const {
  return std::make_tuple(fd_, open_.get(), std::cref(path_)) <
         std::make_tuple(other.fd_, other.open_.get(), std::cref(other.path_));
}

std::shared_ptr<SharedFile> share_descriptor(int fd, Op op, Cache cache) {
  const std::string shown = "file descriptor " + std::to_string(fd);
  return std::make_shared<SharedFile>(shown, [copy = duplicate(fd, shown), op, cache, fd](const std::string&) {
    return File::adopt(copy->get(), op, cache, fd);
  });
}

std::shared_ptr<SharedFile> FileName::share(Op op, Cache cache) const {
  if (open_) return share_open_file(open_.get(), op, cache);
  if (fd_ >= 0) return share_descriptor(fd_, op, cache);
  const bool relative = !path_.empty() && path_[0] != '/';
  auto open = [folder = relative ? folder_now() : std::string(), op, cache](const std::string& path) {
    return File::open(folder + path, op, cache, path);
  };
  return std::make_shared<SharedFile>(path_, std::move(open));
}

}  // namespace nvme_ops
