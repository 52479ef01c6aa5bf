// Collapses long-lived memory into huge pages after the fact: small ones were faster to get, these to transfer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace nvme_ops {

// Runs on a thread of the process, slowly. Contents and addresses stay; pages in transfer wait for another round.
class Collapse {
public:
  static constexpr std::chrono::milliseconds kDelay{1000};  // the caller uses new memory at once and goes first

  // Returns null if there is no thread for it, or no whole huge page.
  static std::shared_ptr<Collapse> start(std::byte* memory, std::uint64_t bytes,
                                         std::chrono::milliseconds delay = kDelay) noexcept;

  // Waits until nothing accesses the memory any more.
  void stop() noexcept;

  Collapse(std::byte* begin, std::byte* end, std::chrono::milliseconds delay);

private:
  friend class Collapser;
  using Clock = std::chrono::steady_clock;

  bool next();   // false: this round is over
  bool again();  // true: there is to be another

  std::mutex mutex_;
  std::byte* const begin_;
  std::byte* const end_;
  std::byte* next_;
  Clock::time_point due_;  // from here on used by the thread only, except stopped_
  bool busy_ = false;
  unsigned rounds_ = 0;
  bool stopped_ = false;
  const unsigned long generation_;
};

}  // namespace nvme_ops
