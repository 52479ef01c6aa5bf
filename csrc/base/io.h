// The vocabulary of all layers: a request to the kernel and its completion.
#pragma once

#include <errno.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

enum class Op : std::uint8_t { Read, Write };

constexpr const char* name_of(Op op) {
  return op == Op::Read ? "read" : "write";
}

// Demand: somebody waits; Prefetch: will wait soon. Writeback: it holds memory. Background: it may take its time.
enum class Priority : std::uint8_t { Demand, Prefetch, Writeback, Background };
inline constexpr std::size_t kPriorities = 4;

// The I/O priority of a request (ioprio_set(2)): the process's own for Demand, else the lowest best-effort levels.
constexpr std::uint16_t io_priority(Priority priority) {
  constexpr unsigned kBestEffort = 2U << 13;
  return priority == Priority::Demand
             ? 0
             : static_cast<std::uint16_t>(kBestEffort | (4U + static_cast<unsigned>(priority)));
}

// One system call's transfer. `buffer` is the index of the registered buffer that holds `data`, or -1.
struct Request {
  Op op;
  int fd;
  std::byte* data;
  std::uint64_t bytes;
  std::uint64_t offset;
  int buffer;
  std::uint64_t token;
  void* file = nullptr;  // the backend's own handle of the file, if it registers files
  Priority priority = Priority::Demand;
};

// Serves a request by a plain system call; returns the bytes moved, or a negated errno.
inline std::int64_t transfer(const Request& request) {
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = request.op == Op::Read ? ::pread(request.fd, request.data, request.bytes, offset)
                                               : ::pwrite(request.fd, request.data, request.bytes, offset);
  return moved < 0 ? -errno : moved;
}

// `result` is the bytes moved, or a negated errno.
struct Completion {
  std::uint64_t token;
  std::int64_t result;
};

}  // namespace nvme_ops
