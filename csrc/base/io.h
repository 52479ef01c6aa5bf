// The vocabulary every layer shares: one transfer asked of the kernel and its answer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

enum class Op : std::uint8_t { Read, Write };

constexpr const char* name_of(Op op) {
  return op == Op::Read ? "read" : "write";
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
};

// `result` is the bytes moved, or a negated errno.
struct Completion {
  std::uint64_t token;
  std::int64_t result;
};

}  // namespace nvme_ops
