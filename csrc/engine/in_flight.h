// Counts, by size, the bytes that the transfers of all handles of one device have in flight: a further transfer shares
// the device with these. Transfers end on any thread, and a process may fork meanwhile: there is no lock.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "base/io.h"
#include "engine/experience.h"

namespace nvme_ops {

class InFlight {
public:
  void begin(Priority priority, std::uint64_t bytes) noexcept {
    Some& some = some_of(priority, bytes);
    some.transfers += 1;
    some.bytes += bytes;
  }
  void end(Priority priority, std::uint64_t bytes) noexcept {
    Some& some = some_of(priority, bytes);
    some.transfers -= 1;
    some.bytes -= bytes;
  }

  bool any() const noexcept {
    return std::any_of(some_.begin(), some_.end(), [](const auto& sizes) {
      return std::any_of(sizes.begin(), sizes.end(), [](const Some& some) { return some.transfers > 0; });
    });
  }

  // Returns the bytes of others that move while `bytes` of this priority do. Lower priorities are overtaken. Within
  // one, transfers take turns (engine/schedule.h): of a larger one, however little of it is left, at most as much
  // moves.
  std::uint64_t beside(Priority priority, std::uint64_t bytes) const noexcept {
    std::uint64_t sum = 0;
    for (std::size_t urgent = 0; urgent <= static_cast<std::size_t>(priority); ++urgent) {
      for (const Some& some : some_[urgent]) sum += std::min<std::uint64_t>(some.bytes, some.transfers * bytes);
    }
    return sum;
  }

  // What is in flight is another process's.
  void forget() noexcept {
    for (auto& sizes : some_) {
      for (Some& some : sizes) some.transfers = some.bytes = 0;
    }
  }

private:
  struct Some {
    std::atomic<std::uint64_t> transfers{0}, bytes{0};
  };

  Some& some_of(Priority priority, std::uint64_t bytes) noexcept {
    return some_[static_cast<std::size_t>(priority)][size_class(bytes)];
  }

  std::array<std::array<Some, kSizeClasses>, kPriorities> some_;
};

}  // namespace nvme_ops
