// A libcufile made of pread and pwrite on host memory, for tests where there is no GPU: the cuFile functions that the
// gds op uses, faults on request, and an account of every misuse. Its names, numbers and layouts are those of cufile.h;
// what it says of speed, or of the real library's inner life, is nothing.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "steering.h"

namespace doubles {

// The order is that of Function in __init__.py.
enum Function : int {
  kDriverOpen,
  kDriverClose,
  kProperties,
  kRegisterFile,
  kDeregisterFile,
  kRegisterMemory,
  kDeregisterMemory,
  kRead,
  kWrite,
  kSetFlag,
  kFunctions
};

// What a test sets and sees, in the order of CuFileState in __init__.py.
struct CuFileState {
  std::array<Calls, kFunctions> calls;
  Number nvidia_fs, features, memory_limit{INT64_MAX};  // what the machine has, to be told before the driver is opened
  Number drivers, files, memories, memory_bytes;        // now
  Number at_once;                                       // the most transfers so far
  Number bytes_read, bytes_written;                     // so far
  Number ragged;                                        // transfers so far that were not of whole pages of the file
  Number lowest{INT64_MAX}, highest;                    // memory touched so far
  Number compatible{1};                                 // whether compatibility mode is allowed now
};

}  // namespace doubles

extern "C" {
doubles::CuFileState fake_state;
}

namespace doubles {
namespace {

CuFileState& state = fake_state;

constexpr std::int64_t kPeerToPeer = 1 << 4;  // CU_FILE_P2P_SUPPORTED

struct Status {
  int code = 0, cuda = 0;
};

struct Description {
  int type;
  union {
    int fd;
    void* other;
  } file;
  const void* operations;
};

// CUfileDrvProps_t as of 1.0; later versions append.
struct Properties {
  unsigned major, minor;
  std::size_t poll_threshold, largest_direct;
  unsigned status_flags, control_flags;
  unsigned features, largest_cache, cache_of_buffer, largest_pinned;
};

struct File {
  int fd;        // the caller's
  int buffered;  // ours, so that any pointer and length will do
  dev_t device;
  ino_t inode;
};

struct Transfer {
  void* file;
  const char* memory;
  std::size_t bytes;
};

// Never destroyed: a driver that hangs uses it to the end.
auto& files = *new std::map<void*, std::unique_ptr<File>>;
auto& memories = *new std::map<const char*, std::size_t>;
auto& transfers = *new std::vector<const Transfer*>;
bool log_chosen = false;

void log_to(const char* path) {
  if (std::FILE* const file = std::fopen(path, "w")) {
    std::fputs("opened\n", file);
    std::fclose(file);
  }
}

bool mapped(const char* memory, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(memory) / page * page;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(memory) + bytes;
  std::vector<unsigned char> pages((end - start) / page + 1);
  return ::mincore(reinterpret_cast<void*>(start), end - start, pages.data()) == 0;
}

int misuse(int code, const std::string& what) {
  violation(what);
  return code;
}

// cuFile's code where the call fails, or 0.
int refusal(Lock& lock, Function function, const char* name) {
  if (state.drivers == 0 && name != nullptr) return misuse(5001, std::string(name) + " without an open driver");
  return static_cast<int>(enter(lock, state.calls.at(function)).result);
}

bool same_file(const File& file) {
  struct stat found;
  return ::fstat(file.fd, &found) == 0 && found.st_dev == file.device && found.st_ino == file.inode;
}

int refusal_of_memory(const char* start, std::size_t bytes) {
  for (const auto& [memory, length] : memories) {
    if (!overlap(start, bytes, memory, length)) continue;
    if (start < memory || start + bytes > memory + length)
      return misuse(5017, "a transfer leaves its registered memory");
  }
  if (mapped(start, bytes)) return 0;
  violation("a transfer of memory that has been freed");
  return 5014;
}

ssize_t transfer(Function function, void* handle, char* memory, std::size_t bytes, off_t offset, off_t memory_offset) {
  Lock lock(mutex);
  char* const start = memory + memory_offset;
  const Transfer moving{handle, start, bytes};
  if (state.drivers == 0) return -misuse(5001, "a transfer without an open driver");
  const auto found = files.find(handle);
  if (found == files.end()) return -misuse(5027, "a transfer of a file that is not registered");
  if (!same_file(*found->second)) violation("a transfer of a file that was closed");
  if (const int code = refusal_of_memory(start, bytes)) return -code;

  const auto from = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(start));
  if (bytes % 4096 != 0 || offset % 4096 != 0) ++state.ragged;
  state.lowest = std::min(state.lowest.load(), from);
  state.highest = std::max(state.highest.load(), from + static_cast<std::int64_t>(bytes));
  transfers.push_back(&moving);
  state.at_once = std::max(state.at_once.load(), static_cast<std::int64_t>(transfers.size()));
  const int fd = found->second->buffered;
  const Fault fault = enter(lock, state.calls.at(function));
  ssize_t moved = fault.result;
  auto error = static_cast<int>(fault.error);
  if (moved == 0) {
    if (fault.most >= 0) bytes = std::min(bytes, static_cast<std::size_t>(fault.most));
    lock.unlock();
    moved = function == kRead ? ::pread(fd, start, bytes, offset) : ::pwrite(fd, start, bytes, offset);
    error = errno;
    lock.lock();
  }
  if (moved > 0) (function == kRead ? state.bytes_read : state.bytes_written) += moved;
  transfers.erase(std::find(transfers.begin(), transfers.end(), &moving));
  lock.unlock();
  if (moved == -1) errno = error;
  return moved;
}

Status close_driver() {
  Lock lock(mutex);
  if (const int code = refusal(lock, kDriverClose, "cuFileDriverClose")) return {code};
  if (!transfers.empty()) violation("the driver is closed during a transfer");
  if (!files.empty()) violation("the driver is closed with files registered");
  if (!memories.empty()) violation("the driver is closed with memory registered");
  --state.drivers;
  return {};
}

}  // namespace

extern "C" {

int nvme_ops_fake_cufile = 1;

Status cuFileDriverOpen() {
  Lock lock(mutex);
  if (const int code = refusal(lock, kDriverOpen, nullptr)) return {code};
  if (state.drivers > 0) return {misuse(5026, "the driver is opened twice")};
  const bool direct = state.nvidia_fs != 0 || (state.features & kPeerToPeer) != 0;
  if (!direct && state.compatible == 0) return {5001};
  ++state.drivers;
  // As the real one: into the working folder, unless it was told otherwise.
  const char* const chosen = std::getenv("CUFILE_LOGFILE_PATH");
  if (!log_chosen) log_to(chosen != nullptr ? chosen : "cufile.log");
  return {};
}

Status cuFileDriverClose() {
  return close_driver();
}

Status cuFileDriverClose_v2() {
  return close_driver();
}

Status cuFileGetVersion(int* version) {
  *version = 1150;
  return {};
}

Status cuFileSetParameterString(int parameter, const char* text) {
  const Lock lock(mutex);
  if (state.drivers > 0) violation("a parameter is set after the driver was opened");
  if (parameter != 1 || text == nullptr) return {5022};
  log_chosen = true;
  log_to(text);
  return {};
}

Status cuFileSetParameterBool(int parameter, bool value) {
  Lock lock(mutex);
  if (state.drivers > 0) violation("a parameter is set after the driver was opened");
  if (const int code = refusal(lock, kSetFlag, nullptr)) return {code};
  if (parameter != 1) return {5022};
  state.compatible = value ? 1 : 0;
  return {};
}

Status cuFileDriverGetProperties(void* into) {
  Lock lock(mutex);
  if (const int code = refusal(lock, kProperties, "cuFileDriverGetProperties")) return {code};
  Properties properties{};
  properties.major = static_cast<unsigned>(state.nvidia_fs);
  properties.features = static_cast<unsigned>(state.features);
  *static_cast<Properties*>(into) = properties;
  return {};
}

Status cuFileHandleRegister(void** handle, Description* description) {
  Lock lock(mutex);
  if (const int code = refusal(lock, kRegisterFile, "cuFileHandleRegister")) return {code};
  const int fd = description->file.fd;
  const int flags = ::fcntl(fd, F_GETFL);
  struct stat found;
  if (description->type != 1 || flags < 0 || ::fstat(fd, &found) != 0)
    return {misuse(5022, "what is registered is no file")};
  for (const auto& [other, file] : files) {
    if (file->fd != fd) continue;
    violation("a descriptor is registered twice");
    return {5028};
  }
  if ((flags & O_DIRECT) == 0) return {misuse(5020, "a file is registered without O_DIRECT")};
  if (found.st_nlink == 0) return {5031};
  const std::string name = "/proc/self/fd/" + std::to_string(fd);
  const int buffered = ::open(name.c_str(), (flags & O_ACCMODE) | O_CLOEXEC);
  if (buffered < 0) return {5031};
  auto file = std::make_unique<File>(File{fd, buffered, found.st_dev, found.st_ino});
  *handle = file.get();
  files.emplace(*handle, std::move(file));
  ++state.files;
  return {};
}

void cuFileHandleDeregister(void* handle) {
  Lock lock(mutex);
  if (refusal(lock, kDeregisterFile, "cuFileHandleDeregister") != 0) return;
  const auto found = files.find(handle);
  if (found == files.end()) return violation("a file is deregistered that is not registered");
  if (!same_file(*found->second)) violation("a file was closed before it is deregistered");
  for (const Transfer* transfer : transfers) {
    if (transfer->file == handle) violation("a file is deregistered during a transfer");
  }
  ::close(found->second->buffered);
  files.erase(found);
  --state.files;
}

Status cuFileBufRegister(const void* memory, std::size_t bytes, int flags) {
  Lock lock(mutex);
  if (const int code = refusal(lock, kRegisterMemory, "cuFileBufRegister")) return {code};
  const auto* const start = static_cast<const char*>(memory);
  if (memory == nullptr || bytes == 0 || flags != 0 || !mapped(start, bytes))
    return {misuse(5022, "what is registered is no memory")};
  for (const auto& [other, length] : memories) {
    if (overlap(start, bytes, other, length)) return {5023};
  }
  if (state.memory_bytes + static_cast<std::int64_t>(bytes) > state.memory_limit) return {5016};
  memories.emplace(start, bytes);
  ++state.memories;
  state.memory_bytes += static_cast<std::int64_t>(bytes);
  return {};
}

Status cuFileBufDeregister(const void* memory) {
  Lock lock(mutex);
  if (const int code = refusal(lock, kDeregisterMemory, "cuFileBufDeregister")) return {code};
  const auto found = memories.find(static_cast<const char*>(memory));
  if (found == memories.end()) return {misuse(5024, "memory is deregistered that is not registered")};
  if (!mapped(found->first, found->second)) violation("memory was freed before it is deregistered");
  for (const Transfer* transfer : transfers) {
    if (overlap(transfer->memory, transfer->bytes, found->first, found->second)) {
      violation("memory is deregistered during a transfer");
    }
  }
  --state.memories;
  state.memory_bytes -= static_cast<std::int64_t>(found->second);
  memories.erase(found);
  return {};
}

ssize_t cuFileRead(void* file, void* memory, std::size_t bytes, off_t offset, off_t memory_offset) {
  return transfer(kRead, file, static_cast<char*>(memory), bytes, offset, memory_offset);
}

ssize_t cuFileWrite(void* file, const void* memory, std::size_t bytes, off_t offset, off_t memory_offset) {
  return transfer(kWrite, file, static_cast<char*>(const_cast<void*>(memory)), bytes, offset, memory_offset);
}
}
}  // namespace doubles
