// Lets requests that somebody waits for pass those that nobody does. A device serves what is in flight about in order,
// so a read that arrives behind a full queue of writes waits for all of them, whatever its priority: while there is
// demand, anywhere in the process, only a little of lower priority is let into flight.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/io.h"

namespace nvme_ops {

// Of one engine, whose lanes share what may be in flight below demand: several devices are several engines' business.
class Admission {
public:
  // False: to be asked again. What was admitted must finish. One request of lower priority is always admitted.
  bool admit(Priority priority, std::uint64_t bytes) noexcept;
  void finish(Priority priority, std::uint64_t bytes) noexcept;

private:
  std::atomic<std::uint64_t> deferable_{0};  // bytes below demand in flight
};

// Somebody is about to wait: said by who submits, since the lane that has other requests in flight may take a while.
void note_demand() noexcept;

}  // namespace nvme_ops
