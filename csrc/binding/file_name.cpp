#include "binding/file_name.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/unique_fd.h"
#include "binding/python.h"

namespace nvme_ops {
namespace {

// The folder that a relative path starts from; empty where it cannot be found, which opening the path will report.
std::string folder_now() {
  char folder[PATH_MAX];
  return ::getcwd(folder, sizeof folder) != nullptr && folder[0] == '/' ? std::string(folder) + "/" : std::string();
}

// A descriptor of ours for the file that `fd` has open, one for all calls under way on it: the caller may close `fd`,
// and has only so many. The file is opened anew through it, so any other on the same file and with the same flags will
// do. With the GIL held.
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
    raise_type_error(std::string("a file must be a path or a file descriptor, not ") + type_name(object));
  }
  const Ref owned(encoded);
  path_.assign(PyBytes_AsString(encoded), static_cast<std::size_t>(PyBytes_Size(encoded)));
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
  return std::make_shared<SharedFile>(shown, [copy = duplicate(fd_, shown), op, cache, fd = fd_](const std::string&) {
    return File::adopt(copy->get(), op, cache, fd);
  });
}

}  // namespace nvme_ops
