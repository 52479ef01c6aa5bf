// Counters of a lane, for handle.statistics(). Written by the thread that drives the lane, read by any.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace nvme_ops {

class Counter {
public:
  // Only one thread adds at a time, so this compiles to a plain addition.
  void add(std::uint64_t value) {
    value_.store(value_.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }
  void add(std::chrono::steady_clock::duration time) {
    add(static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count()));
  }
  void raise_to(std::uint64_t value) {
    if (value > this->value()) value_.store(value, std::memory_order_relaxed);
  }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

private:
  std::atomic<std::uint64_t> value_{0};
};

struct Counters {
  Counter read_bytes, written_bytes;     // by requests and from the page cache
  Counter requests;                      // completed by the kernel
  Counter in_flight_sum, in_flight_max;  // requests in flight, sampled at each submission
  Counter queued_nanoseconds;            // from a share's arrival to its first piece
  Counter kernel_nanoseconds;            // from the submission of each request to its completion
  Counter staged_bytes, cached_bytes;    // of the bytes moved: through staging memory; from or through the page cache
};

// The sums over the lanes of an engine, by name.
using Statistics = std::map<std::string, std::uint64_t>;

inline void add(Statistics& sums, const Counters& lane) {
  const std::pair<const char*, const Counter&> summands[] = {{"read_bytes", lane.read_bytes},
                                                             {"written_bytes", lane.written_bytes},
                                                             {"requests", lane.requests},
                                                             {"in_flight_sum", lane.in_flight_sum},
                                                             {"queued_nanoseconds", lane.queued_nanoseconds},
                                                             {"kernel_nanoseconds", lane.kernel_nanoseconds},
                                                             {"staged_bytes", lane.staged_bytes},
                                                             {"cached_bytes", lane.cached_bytes}};
  for (const auto& [name, counter] : summands) sums[name] += counter.value();
  std::uint64_t& most = sums["in_flight_max"];
  most = std::max(most, lane.in_flight_max.value());
}

}  // namespace nvme_ops
