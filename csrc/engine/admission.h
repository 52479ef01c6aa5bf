// Lets requests that somebody waits for overtake the others: while there is demand anywhere in the process, only a
// little of lower priority is admitted, since a device serves what is in flight roughly in order.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/io.h"

namespace nvme_ops {

// The admission of one engine: its lanes share the bytes below Demand in flight. Several devices have several engines.
class Admission {
public:
  // Returns false if the request must wait; every admitted one must finish. One below Demand is always admitted.
  bool admit(Priority priority, std::uint64_t bytes) noexcept;
  void finish(Priority priority, std::uint64_t bytes) noexcept;

private:
  std::atomic<std::uint64_t> deferable_{0};  // bytes below demand in flight
};

// Records that somebody is about to wait, before a lane that has other requests in flight can see the new one.
void note_demand() noexcept;

}  // namespace nvme_ops
