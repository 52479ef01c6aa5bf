#include "engine/admission.h"

#include <pthread.h>

#include <chrono>

#include "base/limits.h"

namespace nvme_ops {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<std::int64_t> demand{0};  // requests in flight, of all lanes of the process
std::atomic<Clock::rep> last_demand{0};

// A forked child starts from zero: its parent's end in the parent.
const int resetting_demand = pthread_atfork(nullptr, nullptr, [] { demand.store(0, std::memory_order_relaxed); });

std::uint64_t bound_now() noexcept {
  if (demand.load(std::memory_order_relaxed) > 0) return kYieldingBytes;
  const Clock::duration since(Clock::now().time_since_epoch().count() - last_demand.load(std::memory_order_relaxed));
  if (since < std::chrono::milliseconds(kDemandMilliseconds)) return kYieldingBytes;
  return since < std::chrono::milliseconds(kRecentMilliseconds) ? kRecentBytes : kDeferableBytes;
}

}  // namespace

void note_demand() noexcept {
  static_cast<void>(resetting_demand);
  last_demand.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

bool Admission::admit(Priority priority, std::uint64_t bytes) noexcept {
  if (priority == Priority::Demand) {
    demand.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  const std::uint64_t bound = bound_now();
  std::uint64_t in_flight = deferable_.load(std::memory_order_relaxed);
  do {
    if (in_flight > 0 && in_flight + bytes > bound) return false;
  } while (!deferable_.compare_exchange_weak(in_flight, in_flight + bytes, std::memory_order_relaxed));
  return true;
}

void Admission::finish(Priority priority, std::uint64_t bytes) noexcept {
  if (priority != Priority::Demand) {
    deferable_.fetch_sub(bytes, std::memory_order_relaxed);
    return;
  }
  note_demand();
  demand.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace nvme_ops
