// Which parts of a run of a file are in the page cache, in as few calls as possible: one for a run that is there
// completely or not at all; otherwise for ranges that are halved down to one piece and doubled again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace nvme_ops {

class Residency {
public:
  // Returns whether all of [offset, offset + bytes) is in the page cache, in a run that ends at `end`. `ask` returns
  // pages found and pages in all. An answer out of date costs time, never correctness.
  template <class Ask>
  bool covers(std::uint64_t offset, std::uint64_t bytes, std::uint64_t end, Ask&& ask) {
    if (offset >= from_ && offset + bytes <= until_) return resident_;
    for (;;) {
      const std::uint64_t range = std::max(bytes, std::min(window_, end - offset));
      const auto [cached, pages] = ask(offset, range);
      const bool uniform = cached == 0 || cached >= pages;
      if (uniform || range == bytes) {
        from_ = offset;
        until_ = offset + range;
        resident_ = cached >= pages;
        window_ = !uniform ? bytes : range > kUnlimited / 2 ? kUnlimited : 2 * range;
        return resident_;
      }
      window_ = range / 2;
    }
  }

  // Discards an answer that proved wrong.
  void forget() { until_ = from_; }

private:
  static constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

  std::uint64_t from_ = 0, until_ = 0;  // known, and uniform
  std::uint64_t window_ = kUnlimited;
  bool resident_ = false;
};

}  // namespace nvme_ops
