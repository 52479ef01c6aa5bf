// Distinguishes a process from its parent. Threads and rings do not survive a fork; their owners compare generations.
#pragma once

#include <atomic>
#include <memory>

namespace nvme_ops {

// Returns how many forks lie between this process and the one that loaded the op.
unsigned long fork_generation() noexcept;

// Marks a descriptor to be closed in a forked child before the program goes on: a daemon that closes all descriptors
// and opens its own must not get a number that we still use. Takes no lock and allocates nothing.
void close_at_fork(int fd, bool close) noexcept;

// One object per process, never destroyed, for objects that own threads, which a forked child lacks.
template <class Object>
Object& of_this_process() {
  struct Owned {
    Object object;
    const unsigned long generation = fork_generation();
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* known = current.load();
  while (known == nullptr || known->generation != fork_generation()) {
    auto fresh = std::make_unique<Owned>();
    if (current.compare_exchange_strong(known, fresh.get())) known = fresh.release();
  }
  return known->object;
}

}  // namespace nvme_ops
