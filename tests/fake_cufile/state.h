// What the fake libcufile knows: what is open and registered, what it was asked to get wrong, and how it was misused.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// Included once in each library. Unnamed, so that two libraries in one process share nothing.
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

}  // namespace
