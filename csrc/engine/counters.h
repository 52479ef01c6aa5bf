// Counters of a lane, for handle.statistics(). Written by the thread that drives the lane, read by any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

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

// The sums over the lanes of an engine.
struct Statistics {
  std::uint64_t read_bytes = 0, written_bytes = 0, requests = 0, in_flight_sum = 0, in_flight_max = 0,
                queued_nanoseconds = 0, kernel_nanoseconds = 0, staged_bytes = 0, cached_bytes = 0;

  void add(const Counters& lane) {
    read_bytes += lane.read_bytes.value();
    written_bytes += lane.written_bytes.value();
    requests += lane.requests.value();
    in_flight_sum += lane.in_flight_sum.value();
    if (lane.in_flight_max.value() > in_flight_max) in_flight_max = lane.in_flight_max.value();
    queued_nanoseconds += lane.queued_nanoseconds.value();
    kernel_nanoseconds += lane.kernel_nanoseconds.value();
    staged_bytes += lane.staged_bytes.value();
    cached_bytes += lane.cached_bytes.value();
  }
};

}  // namespace nvme_ops
