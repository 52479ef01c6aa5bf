// A result that arrives once: bytes moved or a failure. Anyone may wait for it or register a listener.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/endings.h"

namespace nvme_ops {

class Outcome {
public:
  void succeed(std::uint64_t bytes) noexcept { settle(bytes, std::nullopt); }
  void fail(Failure failure) noexcept { settle(0, std::move(failure)); }

  bool done() const { return done_.load(std::memory_order_acquire); }  // takes no lock: a forked child may ask

  // Returns false if `timeout` passed first.
  bool wait_for(std::chrono::microseconds timeout) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return settled_.wait_for(lock, timeout, [this] { return done(); });
  }

  // Runs `listener`, which must not throw, on the thread that settles the outcome, at once if it is settled.
  void then(std::function<void()> listener) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!done()) {
        listeners_.push_back(std::move(listener));
        return;
      }
    }
    listener();
  }

  // Once done.
  std::uint64_t bytes() const { return bytes_; }
  std::chrono::steady_clock::time_point settled_at() const { return settled_at_; }
  const std::optional<Failure>& failure() const { return failure_; }
  void raise_failure() const {
    if (failure_) raise(*failure_);
  }

private:
  void settle(std::uint64_t bytes, std::optional<Failure> failure) noexcept {
    std::vector<std::function<void()>> listeners;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      bytes_ = bytes;
      failure_ = std::move(failure);
      settled_at_ = std::chrono::steady_clock::now();
      done_ = true;
      listeners.swap(listeners_);
      settled_.notify_all();
    }
    for (const auto& listener : listeners) listener();
    Endings::instance().note();
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable settled_;
  std::atomic<bool> done_{false};
  std::uint64_t bytes_ = 0;
  std::chrono::steady_clock::time_point settled_at_;
  std::optional<Failure> failure_;
  std::vector<std::function<void()>> listeners_;
};

}  // namespace nvme_ops
