// Wakes threads that wait for memory when something ends that may have held some. One counter for the process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/fork.h"

namespace nvme_ops {

class Endings {
public:
  static Endings& instance() { return of_this_process<Endings>(); }

  std::uint64_t count() const { return count_.load(); }

  // Costs two atomic operations if nobody waits.
  void note() noexcept {
    count_.fetch_add(1);
    if (waiting_.load() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_.notify_all();
  }

  // Waits until something has ended since the count was `seen`, or `timeout` has passed.
  void wait(std::uint64_t seen, std::chrono::microseconds timeout) {
    waiting_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      ended_.wait_for(lock, timeout, [&] { return count_.load() != seen; });
    }
    waiting_.fetch_sub(1);
  }

private:
  std::atomic<std::uint64_t> count_{0};
  std::atomic<unsigned> waiting_{0};
  std::mutex mutex_;
  std::condition_variable ended_;
};

}  // namespace nvme_ops
