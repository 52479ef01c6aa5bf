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
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// Unnamed, so that two libraries in one process share nothing.
namespace {

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

constexpr unsigned kPeerToPeer = 1U << 4;  // CU_FILE_P2P_SUPPORTED

struct Status {
  int code, cuda;
};
Status status(int code) {
  return {code, 0};
}

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

struct Fault {
  int function;
  std::int64_t first, count;  // the calls from now on that it concerns; count < 0: all from the first on
  std::int64_t result;        // negative: returned by read and write; positive: cuFile's code; 0: none
  int error;                  // errno beside a result of -1
  std::int64_t most;          // bytes moved at most; negative: no limit
  int delay;                  // in milliseconds
};

// What a test asks; laid out as Statistics in __init__.py.
struct Statistics {
  std::array<std::int64_t, kFunctions> calls;
  std::int64_t drivers, files, memories, memory_bytes;  // now
  std::int64_t at_once;                                 // the most transfers so far
  std::int64_t bytes_read, bytes_written;               // so far
  std::int64_t ragged;                                  // transfers so far that were not of whole pages of the file
  std::uintptr_t lowest, highest;                       // memory touched so far
  std::int64_t compatible;                              // whether compatibility mode is allowed now
};

struct State {
  std::mutex mutex;
  std::condition_variable let_go;
  unsigned nvidia_fs_major = 0, features = 0;
  std::size_t memory_limit = SIZE_MAX;
  std::array<bool, kFunctions> held{};
  std::array<int, kFunctions> held_up{};
  std::vector<Fault> faults;
  Statistics statistics{{}, 0, 0, 0, 0, 0, 0, 0, 0, UINTPTR_MAX, 0, 1};
  std::string violations;
  bool log_chosen = false;
  std::map<void*, std::unique_ptr<File>> files;
  std::map<const char*, std::size_t> memories;
  struct Transfer {
    void* file;
    const char* memory;
    std::size_t bytes;
  };
  std::vector<const Transfer*> transfers;
};

State& state() {
  static State* const only = new State;  // never destroyed: a driver that hangs uses it to the end
  return *only;
}

using Lock = std::unique_lock<std::mutex>;

void violation(const std::string& what) {
  state().violations += what + "\n";
}

void log_to(const char* path) {
  if (std::FILE* const file = std::fopen(path, "w")) {
    std::fputs("opened\n", file);
    std::fclose(file);
  }
}

bool overlap(const char* one, std::size_t bytes, const char* other, std::size_t length) {
  return one < other + length && other < one + bytes;
}

bool mapped(const char* memory, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(memory) / page * page;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(memory) + bytes;
  std::vector<unsigned char> pages((end - start) / page + 1);
  return ::mincore(reinterpret_cast<void*>(start), end - start, pages.data()) == 0;
}

// Counts the call, and waits, fails and delays it as it was asked.
std::optional<Fault> enter(Lock& lock, Function function) {
  State& now = state();
  ++now.statistics.calls[function];
  std::optional<Fault> met;
  for (Fault& fault : now.faults) {
    if (fault.function != function || --fault.first > 0 || fault.count == 0) continue;
    if (fault.count > 0) --fault.count;
    met = fault;
  }
  ++now.held_up[function];
  now.let_go.notify_all();
  now.let_go.wait(lock, [&] { return !now.held[function]; });
  --now.held_up[function];
  if (met && met->delay > 0) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(met->delay));
    lock.lock();
  }
  return met;
}

// cuFile's code of the fault that the call meets, or 0.
int refusal(Lock& lock, Function function) {
  const std::optional<Fault> fault = enter(lock, function);
  return fault ? static_cast<int>(std::max<std::int64_t>(fault->result, 0)) : 0;
}

bool open_driver(const char* caller) {
  if (state().statistics.drivers > 0) return true;
  violation(std::string(caller) + " without an open driver");
  return false;
}

bool same_file(const File& file) {
  struct stat found;
  return ::fstat(file.fd, &found) == 0 && found.st_dev == file.device && found.st_ino == file.inode;
}

int refusal_of_memory(const char* start, std::size_t bytes) {
  for (const auto& [memory, length] : state().memories) {
    if (!overlap(start, bytes, memory, length)) continue;
    if (start < memory || start + bytes > memory + length) {
      violation("a transfer leaves its registered memory");
      return 5017;
    }
  }
  if (mapped(start, bytes)) return 0;
  violation("a transfer of memory that has been freed");
  return 5014;
}

ssize_t transfer(Function function, void* handle, char* memory, std::size_t bytes, off_t offset, off_t memory_offset) {
  State& now = state();
  Lock lock(now.mutex);
  char* const start = memory + memory_offset;
  const State::Transfer transfer{handle, start, bytes};
  if (!open_driver(function == kRead ? "cuFileRead" : "cuFileWrite")) return -5001;
  const auto found = now.files.find(handle);
  if (found == now.files.end()) {
    violation("a transfer of a file that is not registered");
    return -5027;
  }
  if (!same_file(*found->second)) violation("a transfer of a file that was closed");
  if (const int code = refusal_of_memory(start, bytes)) return -code;

  Statistics& statistics = now.statistics;
  if (bytes % 4096 != 0 || offset % 4096 != 0) ++statistics.ragged;
  statistics.lowest = std::min(statistics.lowest, reinterpret_cast<std::uintptr_t>(start));
  statistics.highest = std::max(statistics.highest, reinterpret_cast<std::uintptr_t>(start) + bytes);
  now.transfers.push_back(&transfer);
  statistics.at_once = std::max(statistics.at_once, static_cast<std::int64_t>(now.transfers.size()));
  const int fd = found->second->buffered;
  const std::optional<Fault> fault = enter(lock, function);
  ssize_t moved;
  int error = 0;
  if (fault && fault->result != 0) {
    moved = fault->result;
    error = fault->error;
  } else {
    if (fault && fault->most >= 0) bytes = std::min(bytes, static_cast<std::size_t>(fault->most));
    lock.unlock();
    moved = function == kRead ? ::pread(fd, start, bytes, offset) : ::pwrite(fd, start, bytes, offset);
    error = errno;
    lock.lock();
  }
  if (moved > 0) (function == kRead ? statistics.bytes_read : statistics.bytes_written) += moved;
  now.transfers.erase(std::find(now.transfers.begin(), now.transfers.end(), &transfer));
  lock.unlock();
  if (moved == -1) errno = error;
  return moved;
}

Status close_driver() {
  State& now = state();
  Lock lock(now.mutex);
  if (const int code = refusal(lock, kDriverClose)) return status(code);
  if (!open_driver("cuFileDriverClose")) return status(5001);
  if (!now.transfers.empty()) violation("the driver is closed during a transfer");
  if (!now.files.empty()) violation("the driver is closed with files registered");
  if (!now.memories.empty()) violation("the driver is closed with memory registered");
  --now.statistics.drivers;
  return status(0);
}

}  // namespace

extern "C" {

int nvme_ops_fake_cufile = 1;

Status cuFileDriverOpen() {
  State& now = state();
  Lock lock(now.mutex);
  if (const int code = refusal(lock, kDriverOpen)) return status(code);
  if (now.statistics.drivers > 0) {
    violation("the driver is opened twice");
    return status(5026);
  }
  const bool direct = now.nvidia_fs_major != 0 || (now.features & kPeerToPeer) != 0;
  if (!direct && now.statistics.compatible == 0) return status(5001);
  ++now.statistics.drivers;
  // As the real one: into the working folder, unless it was told otherwise.
  const char* const chosen = std::getenv("CUFILE_LOGFILE_PATH");
  if (!now.log_chosen) log_to(chosen != nullptr ? chosen : "cufile.log");
  return status(0);
}

Status cuFileDriverClose() {
  return close_driver();
}

Status cuFileDriverClose_v2() {
  return close_driver();
}

Status cuFileGetVersion(int* version) {
  *version = 1150;
  return status(0);
}

Status cuFileSetParameterString(int parameter, const char* text) {
  State& now = state();
  const Lock lock(now.mutex);
  if (now.statistics.drivers > 0) violation("a parameter is set after the driver was opened");
  if (parameter != 1 || text == nullptr) return status(5022);
  now.log_chosen = true;
  log_to(text);
  return status(0);
}

Status cuFileSetParameterBool(int parameter, bool value) {
  State& now = state();
  Lock lock(now.mutex);
  if (now.statistics.drivers > 0) violation("a parameter is set after the driver was opened");
  if (const int code = refusal(lock, kSetFlag)) return status(code);
  if (parameter != 1) return status(5022);
  now.statistics.compatible = value ? 1 : 0;
  return status(0);
}

Status cuFileDriverGetProperties(void* into) {
  State& now = state();
  Lock lock(now.mutex);
  if (!open_driver("cuFileDriverGetProperties")) return status(5001);
  if (const int code = refusal(lock, kProperties)) return status(code);
  Properties properties{};
  properties.major = now.nvidia_fs_major;
  properties.features = now.features;
  *static_cast<Properties*>(into) = properties;
  return status(0);
}

Status cuFileHandleRegister(void** handle, Description* description) {
  State& now = state();
  Lock lock(now.mutex);
  if (!open_driver("cuFileHandleRegister")) return status(5001);
  if (const int code = refusal(lock, kRegisterFile)) return status(code);
  const int fd = description->file.fd;
  const int flags = ::fcntl(fd, F_GETFL);
  struct stat found;
  if (description->type != 1 || flags < 0 || ::fstat(fd, &found) != 0) {
    violation("what is registered is no file");
    return status(5022);
  }
  for (const auto& [other, file] : now.files) {
    if (file->fd != fd) continue;
    violation("a descriptor is registered twice");
    return status(5028);
  }
  if ((flags & O_DIRECT) == 0) {
    violation("a file is registered without O_DIRECT");
    return status(5020);
  }
  if (found.st_nlink == 0) return status(5031);
  const std::string name = "/proc/self/fd/" + std::to_string(fd);
  const int buffered = ::open(name.c_str(), (flags & O_ACCMODE) | O_CLOEXEC);
  if (buffered < 0) return status(5031);
  auto file = std::make_unique<File>(File{fd, buffered, found.st_dev, found.st_ino});
  *handle = file.get();
  now.files.emplace(*handle, std::move(file));
  ++now.statistics.files;
  return status(0);
}

void cuFileHandleDeregister(void* handle) {
  State& now = state();
  Lock lock(now.mutex);
  if (!open_driver("cuFileHandleDeregister")) return;
  enter(lock, kDeregisterFile);
  const auto found = now.files.find(handle);
  if (found == now.files.end()) return violation("a file is deregistered that is not registered");
  if (!same_file(*found->second)) violation("a file was closed before it is deregistered");
  for (const State::Transfer* transfer : now.transfers) {
    if (transfer->file == handle) violation("a file is deregistered during a transfer");
  }
  ::close(found->second->buffered);
  now.files.erase(found);
  --now.statistics.files;
}

Status cuFileBufRegister(const void* memory, std::size_t bytes, int flags) {
  State& now = state();
  Lock lock(now.mutex);
  if (!open_driver("cuFileBufRegister")) return status(5001);
  if (const int code = refusal(lock, kRegisterMemory)) return status(code);
  const auto* const start = static_cast<const char*>(memory);
  if (memory == nullptr || bytes == 0 || flags != 0 || !mapped(start, bytes)) {
    violation("what is registered is no memory");
    return status(5022);
  }
  for (const auto& [other, length] : now.memories) {
    if (overlap(start, bytes, other, length)) return status(5023);
  }
  if (static_cast<std::size_t>(now.statistics.memory_bytes) + bytes > now.memory_limit) return status(5016);
  now.memories.emplace(start, bytes);
  ++now.statistics.memories;
  now.statistics.memory_bytes += static_cast<std::int64_t>(bytes);
  return status(0);
}

Status cuFileBufDeregister(const void* memory) {
  State& now = state();
  Lock lock(now.mutex);
  if (!open_driver("cuFileBufDeregister")) return status(5001);
  enter(lock, kDeregisterMemory);
  const auto found = now.memories.find(static_cast<const char*>(memory));
  if (found == now.memories.end()) {
    violation("memory is deregistered that is not registered");
    return status(5024);
  }
  if (!mapped(found->first, found->second)) violation("memory was freed before it is deregistered");
  for (const State::Transfer* transfer : now.transfers) {
    if (overlap(transfer->memory, transfer->bytes, found->first, found->second)) {
      violation("memory is deregistered during a transfer");
    }
  }
  --now.statistics.memories;
  now.statistics.memory_bytes -= static_cast<std::int64_t>(found->second);
  now.memories.erase(found);
  return status(0);
}

ssize_t cuFileRead(void* file, void* memory, std::size_t bytes, off_t offset, off_t memory_offset) {
  return transfer(kRead, file, static_cast<char*>(memory), bytes, offset, memory_offset);
}

ssize_t cuFileWrite(void* file, const void* memory, std::size_t bytes, off_t offset, off_t memory_offset) {
  return transfer(kWrite, file, static_cast<char*>(const_cast<void*>(memory)), bytes, offset, memory_offset);
}

// For the tests.

void fake_configure(unsigned nvidia_fs_major, unsigned features, std::size_t memory_limit) {
  const Lock lock(state().mutex);
  state().nvidia_fs_major = nvidia_fs_major;
  state().features = features;
  state().memory_limit = memory_limit;
}

void fake_inject(const Fault* fault) {
  const Lock lock(state().mutex);
  state().faults.push_back(*fault);
}

void fake_mend() {
  const Lock lock(state().mutex);
  state().faults.clear();
}

void fake_hold(int function, int held) {
  const Lock lock(state().mutex);
  state().held.at(static_cast<std::size_t>(function)) = held != 0;
  state().let_go.notify_all();
}

int fake_wait_held_up(int function, int count, int milliseconds) {
  Lock lock(state().mutex);
  const auto there = [&] { return state().held_up.at(static_cast<std::size_t>(function)) >= count; };
  return state().let_go.wait_for(lock, std::chrono::milliseconds(milliseconds), there) ? 1 : 0;
}

void fake_statistics(Statistics* into) {
  const Lock lock(state().mutex);
  *into = state().statistics;
}

const char* fake_violations() {
  const Lock lock(state().mutex);
  return state().violations.c_str();
}
}
