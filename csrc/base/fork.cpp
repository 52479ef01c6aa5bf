#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace nvme_ops {
namespace {

constexpr std::size_t kBits = 64;
constexpr std::size_t kDescriptors = 1 << 20;  // the kernel's default for fs.nr_open; higher ones stay open in a child

std::atomic<unsigned long> generation{0};
std::array<std::atomic<std::uint64_t>, kDescriptors / kBits> ours{};

void in_child() {
  for (std::size_t word = 0; word < ours.size(); ++word) {
    for (std::uint64_t bits = ours[word].exchange(0, std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
      ::close(static_cast<int>(word * kBits + static_cast<std::size_t>(__builtin_ctzll(bits))));
    }
  }
  generation.fetch_add(1, std::memory_order_relaxed);
}

const int watching = pthread_atfork(nullptr, nullptr, in_child);

}  // namespace

unsigned long fork_generation() noexcept {
  static_cast<void>(watching);
  return generation.load(std::memory_order_relaxed);
}

void close_at_fork(int fd, bool close) noexcept {
  if (fd < 0 || static_cast<std::size_t>(fd) >= kDescriptors) return;
  const std::uint64_t bit = std::uint64_t{1} << (static_cast<std::size_t>(fd) % kBits);
  auto& word = ours[static_cast<std::size_t>(fd) / kBits];
  close ? word.fetch_or(bit, std::memory_order_relaxed) : word.fetch_and(~bit, std::memory_order_relaxed);
}

}  // namespace nvme_ops
