// One object per process, for objects that own threads: a forked child has none of the threads and makes its own
// object.
#pragma once

#include <atomic>
#include <memory>

#include "base/fork.h"

namespace nvme_ops {

// Never destroyed. A child leaves its parent's object untouched, whoever may hold its locks.
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
