// The vocabulary every layer shares: one transfer asked of the kernel and its answer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

enum class Op : std::uint8_t { Read, Write };

constexpr const char* name_of(Op op) {
  return op == Op::Read ? "read" : "write";
}

// How urgent a transfer is. Demand: somebody waits for it. Prefetch: somebody will. Writeback: nobody waits, but memory
// is held until it ends. Background: it may take its time.
enum class Priority : std::uint8_t { Demand, Prefetch, Writeback, Background };
inline constexpr std::size_t kPriorities = 4;

// The kernel's I/O priority (ioprio_set(2)) of a request: 0 leaves it to the process; below that the lower levels of
// the best-effort class, of which 7 is the last.
constexpr std::uint16_t io_priority(Priority priority) {
  constexpr unsigned kBestEffort = 2U << 13;
  return priority == Priority::Demand
             ? 0
             : static_cast<std::uint16_t>(kBestEffort | (4U + static_cast<unsigned>(priority)));
}

// One system-level transfer. `buffer` is the index of a buffer the queue has registered and that holds `data`, or -1.
struct Request {
  Op op;
  int fd;
  std::byte* data;
  std::uint64_t bytes;
  std::uint64_t offset;
  int buffer;
  std::uint64_t token;
  void* file = nullptr;  // what the backend knows the file as, if it registers files
  Priority priority = Priority::Demand;
};

// `result` is the bytes moved, or a negated errno.
struct Completion {
  std::uint64_t token;
  std::int64_t result;
};

}  // namespace nvme_ops
