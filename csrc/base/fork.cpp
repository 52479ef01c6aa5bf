#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace nvme_ops {
namespace {

std::atomic<unsigned long> generation{0};

const int watching = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

unsigned long fork_generation() noexcept {
  static_cast<void>(watching);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace nvme_ops
