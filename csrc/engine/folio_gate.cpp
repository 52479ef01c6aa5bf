#include "engine/folio_gate.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <utility>

#include "base/error.h"
#include "engine/file.h"

namespace nvme_ops {
namespace {

// Writes in flight by a hash of file and folio: direct ones count upwards, cached ones downwards. Collisions only wait.
constexpr std::size_t kCounters = 1 << 14;
std::array<std::atomic<int>, kCounters> counters{};

// A forked child starts from zero: its parent's end in the parent.
const int resetting = pthread_atfork(nullptr, nullptr, [] {
  for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
});

std::size_t hash(std::uint64_t inode, std::uint64_t folio) {
  std::uint64_t mixed = (inode * 0x9e3779b97f4a7c15 + folio) * 0xbf58476d1ce4e5b9;
  mixed ^= mixed >> 32;
  return mixed % kCounters;
}

// The counters of the folios in which a write begins and ends.
std::pair<std::size_t, std::size_t> ends_of(const GatedWrite& write) {
  return {hash(write.inode, write.offset / folio_bytes()),
          hash(write.inode, (write.offset + write.bytes - 1) / folio_bytes())};
}

int step_of(const GatedWrite& write) {
  return write.kind == WriteKind::Direct ? 1 : -1;
}

bool enter(std::atomic<int>& counter, int step) {
  int value = counter.load(std::memory_order_relaxed);
  while (value * step >= 0) {
    if (counter.compare_exchange_weak(value, value + step, std::memory_order_acquire)) return true;
  }
  return false;
}

void leave(std::atomic<int>& counter, int step) {
  const int before = counter.fetch_sub(step, std::memory_order_release);
  NVME_INVARIANT(before * step > 0);
}

}  // namespace

std::uint64_t folio_bytes() {
  // MAX_PAGECACHE_ORDER: a huge page (2 MiB with pages of 4 KiB), and never more than 2048 pages.
  static const std::uint64_t bytes = page_size() * (page_size() == 4096 ? 512 : 2048);
  return bytes;
}

bool enter_folios(const GatedWrite& write) noexcept {
  static_cast<void>(resetting);
  const auto [first, last] = ends_of(write);
  const int step = step_of(write);
  if (!enter(counters[first], step)) return false;
  if (last == first || enter(counters[last], step)) return true;
  leave(counters[first], step);
  return false;
}

void leave_folios(const GatedWrite& write) noexcept {
  const auto [first, last] = ends_of(write);
  leave(counters[first], step_of(write));
  if (last != first) leave(counters[last], step_of(write));
}

}  // namespace nvme_ops
