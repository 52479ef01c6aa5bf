// What of a run of a file lies in the page cache, asked in as few calls as its state allows: one for a run that is
// there in full or not at all; where both meet, ranges that halve down to one piece and double again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace nvme_ops {

class Residency {
public:
  // Whether all of [offset, offset + bytes) is there; the run ends at `end`. `ask(offset, bytes)` returns pages found
  // and pages in all. What was learned may be out of date: that costs time, never the right bytes.
  template <class Ask>
  bool covers(std::uint64_t offset, std::uint64_t bytes, std::uint64_t end, Ask&& ask) {
    if (offset >= from_ && offset + bytes <= until_) return resident_;
    for (;;) {
      const std::uint64_t range = std::max(bytes, std::min(window_, end - offset));
      const auto [found, pages] = ask(offset, range);
      const bool uniform = found == 0 || found >= pages;
      if (uniform || range == bytes) {
        from_ = offset;
        until_ = offset + range;
        resident_ = found >= pages;
        window_ = !uniform ? bytes : range > kUnlimited / 2 ? kUnlimited : 2 * range;
        return resident_;
      }
      window_ = range / 2;
    }
  }

  // It was not as it was said to be.
  void forget() { until_ = from_; }

private:
  static constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

  std::uint64_t from_ = 0, until_ = 0;  // known, and uniform
  std::uint64_t window_ = kUnlimited;
  bool resident_ = false;
};

}  // namespace nvme_ops
