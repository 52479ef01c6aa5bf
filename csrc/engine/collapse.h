// Huge pages, afterwards, for memory that is kept: small ones were quicker to get when somebody waited for them, and
// transfers are faster by a fifth in huge ones.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace nvme_ops {

// On a thread of the process, slowly. Contents and addresses stay; pages that are being transferred wait for another
// round.
class Collapse {
public:
  static constexpr std::chrono::milliseconds kDelay{1000};  // whoever asks for memory uses it at once, and comes first

  // Null where there is no thread for it, or no whole huge page.
  static std::shared_ptr<Collapse> start(std::byte* memory, std::uint64_t bytes,
                                         std::chrono::milliseconds delay = kDelay) noexcept;

  // When it returns nothing touches the memory any more.
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
  Clock::time_point due_;  // the fields from here on are the thread's own, but for stopped_
  bool busy_ = false;
  unsigned rounds_ = 0;
  bool stopped_ = false;
  const unsigned long generation_;
};

}  // namespace nvme_ops
