#include "engine/population.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "base/fork.h"
#include "base/thread.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kLeastChunks = 4;  // fewer are not worth a thread
constexpr unsigned kMaxPopulators = 4;
constexpr std::size_t kLead = 32;   // with a lead of this many chunks one thread is enough
constexpr unsigned kTrySoon = 8;    // chunks in small pages before a huge one is tried; doubled each time it is slower,
constexpr unsigned kTryLate = 64;   // up to this; and huge ones before a small one is tried
constexpr std::size_t kLarge = 64;  // from this size on huge pages are tried at once
constexpr std::int64_t kUsual = 600'000;        // nanoseconds for a chunk in small pages, until measured
constexpr std::int64_t kReserve = 16 * kUsual;  // the most nanoseconds saved by huge pages that they may lose again

// Huge pages are filled fastest, and cleared in a sixth of the time if the machine has free ones; where a host must
// reclaim them first, they take eight times as long. So they are used while their recent savings pay for their cost.
class PageChoice {
public:
  bool huge() {
    const bool paying = saved_.load(std::memory_order_relaxed) > 0;
    const unsigned patience = paying ? kTryLate : patience_.load(std::memory_order_relaxed);
    if (since_.fetch_add(1, std::memory_order_relaxed) < patience) return paying;
    since_.store(0, std::memory_order_relaxed);
    return !paying;
  }
  // The machine may have different memory available than last time.
  void try_huge() {
    if (saved_.load(std::memory_order_relaxed) <= 0) since_.store(kTryLate, std::memory_order_relaxed);
  }
  void note(bool huge, std::chrono::nanoseconds took) {
    const std::int64_t small = small_.load(std::memory_order_relaxed);
    const std::int64_t saving = small - took.count();
    if (!huge) {  // adopts a better rate at once
      small_.store(saving > 0 ? small - saving / 2 : small - saving / 8, std::memory_order_relaxed);
      return;
    }
    const unsigned patience = patience_.load(std::memory_order_relaxed);
    const std::int64_t saved = saved_.load(std::memory_order_relaxed);
    saved_.store(std::clamp<std::int64_t>(saved + saving, 0, kReserve), std::memory_order_relaxed);
    patience_.store(saving > 0 ? kTrySoon : std::min(2 * patience, kTryLate), std::memory_order_relaxed);
  }

private:
  std::atomic<std::int64_t> small_{kUsual};  // nanoseconds for a chunk in small pages, recent average
  std::atomic<std::int64_t> saved_{1};       // nanoseconds saved by huge pages
  std::atomic<unsigned> since_{0}, patience_{kTrySoon};
};

PageChoice& page_choice() {
  static PageChoice choice;
  return choice;
}

bool has_page(std::byte* page) {
  unsigned char there = 0;
  return ::mincore(page, kPageSize, &there) != 0 || (there & 1) != 0;
}

// madvise takes the lock that every page fault needs, so it is called seldom: what is populated is MADV_NOHUGEPAGE as a
// whole, and MADV_HUGEPAGE chunk by chunk where a huge page is wanted.
void populate(std::byte* memory, std::size_t bytes, bool huge) noexcept {
  using Clock = std::chrono::steady_clock;
  if (huge) ::madvise(memory, bytes, MADV_HUGEPAGE);
  // after madvise: its wait for the lock takes as long as the faults in small pages of other threads
  const auto start = Clock::now();
  if (::madvise(memory, bytes, kPopulateWrite) == 0) page_choice().note(huge, Clock::now() - start);
}

}  // namespace

// A few threads for all populations, which exist while there is something to do.
class Populators {
public:
  // Throws if no thread can be started.
  void add(const std::shared_ptr<Population>& population) {
    const std::size_t wanted = std::min<std::size_t>(
        {kMaxPopulators, std::max(1U, std::thread::hardware_concurrency()), population->starts_.size()});
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(population);
    try {
      if (!led_) quiet_thread([this] { lead(); }).detach();
      led_ = true;
    } catch (const std::exception&) {
      waiting_.pop_back();
      throw;
    }
    try {
      for (; helpers_ + 1 < wanted; ++helpers_) quiet_thread([this] { help(); }).detach();
    } catch (const std::exception&) {  // one is enough
    }
  }

  void wake_helpers() {
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  void note_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.notify_all();
  }

  void wait_until_idle(const Population& population) {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [&] { return population.busy_.load() == 0; });
  }

private:
  void lead() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!waiting_.empty()) populate_next(lock);
    led_ = false;
    wake_.notify_all();
  }

  // Stops when no longer needed, when it would slow down the transfers, and the host of a virtual machine.
  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!waiting_.empty()) waiting_.front()->behind_.load() ? populate_next(lock) : wake_.wait(lock);
    --helpers_;
  }

  void populate_next(std::unique_lock<std::mutex>& lock) {
    const std::shared_ptr<Population> population = waiting_.front();
    lock.unlock();
    const bool more = population->populate_next();
    lock.lock();
    if (more || waiting_.empty() || waiting_.front() != population) return;
    waiting_.pop_front();
    wake_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable idle_, wake_;
  std::deque<std::shared_ptr<Population>> waiting_;
  bool led_ = false;
  std::size_t helpers_ = 0;
};

void Population::Part::advise(int advice) const noexcept {
  ::madvise(begin, static_cast<std::size_t>(end - begin), advice);  // a hint: kernels without huge pages refuse it
}

void Population::add(std::byte* memory, std::uint64_t bytes) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + kChunk - 1) / kChunk * kChunk;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kChunk * kChunk;
  if (begin >= end) return;
  auto* const first = reinterpret_cast<std::byte*>(begin);
  auto* const last = reinterpret_cast<std::byte*>(end);
  if (has_page(first) || has_page(last - kChunk)) return;
  parts_.push_back({first, last, starts_.size()});
  for (std::byte* chunk = first; chunk < last; chunk += kChunk) starts_.push_back(chunk);
}

std::shared_ptr<const Population> Population::start(std::shared_ptr<Population> population) {
  Population& started = *population;
  started.generation_ = fork_generation();
  std::sort(started.parts_.begin(), started.parts_.end(),
            [](const Part& one, const Part& other) { return one.begin < other.begin; });
  started.done_ = std::make_unique<std::atomic<bool>[]>(started.starts_.size());
  std::shared_ptr<const Population> handle(&started, [population](const Population*) { population->stop(); });
  const bool worth_a_thread = started.starts_.size() >= kLeastChunks;
  try {
    if (worth_a_thread) {
      for (const Part& part : started.parts_) part.advise(MADV_NOHUGEPAGE);
      if (started.starts_.size() >= kLarge) page_choice().try_huge();
      of_this_process<Populators>().add(population);
      return handle;
    }
  } catch (const std::exception&) {  // no thread could be started
  }
  // Removes MADV_NOHUGEPAGE from all of it: the memory may be the pool's, which transfers use again.
  if (worth_a_thread || page_choice().huge()) {
    for (const Part& part : started.parts_) part.advise(MADV_HUGEPAGE);
  }
  started.next_ = started.starts_.size();
  started.parts_.clear();
  return handle;
}

bool Population::reached(const std::byte* memory, std::uint64_t bytes) const {
  const std::byte* const end = memory + bytes;
  auto part = std::upper_bound(parts_.begin(), parts_.end(), memory,
                               [](const std::byte* wanted, const Part& candidate) { return wanted < candidate.end; });
  for (; part != parts_.end() && part->begin < end; ++part) {
    const std::byte* const from = std::max<const std::byte*>(memory, part->begin);
    const std::byte* const to = std::min<const std::byte*>(end, part->end);
    const std::size_t first = part->first + static_cast<std::size_t>(from - part->begin) / kChunk;
    const std::size_t last = part->first + static_cast<std::size_t>(to - 1 - part->begin) / kChunk;
    const bool behind = last + kLead >= next_.load(std::memory_order_relaxed);
    if (behind != behind_.load() && !behind_.exchange(behind)) of_this_process<Populators>().wake_helpers();
    for (std::size_t chunk = first; chunk <= last; ++chunk) {
      if (!done_[chunk].load(std::memory_order_acquire)) return false;
    }
  }
  return true;
}

bool Population::populate_next() {
  busy_.fetch_add(1);
  const std::size_t chunk = next_.fetch_add(1);
  if (chunk < starts_.size()) {
    const bool huge = page_choice().huge();
    populate(starts_[chunk], kChunk, huge);
    if (!huge) small_.store(true, std::memory_order_relaxed);
    done_[chunk].store(true, std::memory_order_release);
  }
  const bool more = next_.load() < starts_.size();
  if (busy_.fetch_sub(1) == 1 && !more) of_this_process<Populators>().note_idle();
  return more;
}

void Population::wait_until_idle() const {
  if (busy_.load() > 0) of_this_process<Populators>().wait_until_idle(*this);
}

void Population::stop() {
  if (generation_ != fork_generation()) return;  // the parent's threads populate it in the parent
  next_.store(starts_.size());
  wait_until_idle();
  for (const Part& part : parts_) part.advise(MADV_HUGEPAGE);  // for khugepaged, and for whoever uses it next
}

bool populate_now(std::byte* memory, std::uint64_t bytes) {
  const auto population = std::make_shared<Population>();
  population->add(memory, bytes);
  if (population->empty()) return true;
  const auto handle = Population::start(population);
  while (population->populate_next()) {
  }
  population->wait_until_idle();
  return population->small_;
}

void populate_in_part(std::byte* memory, std::uint64_t bytes, std::uint64_t start, std::uint64_t stop) {
  constexpr std::uint64_t kChunk = kHugePage;
  const std::uint64_t head = (kChunk - reinterpret_cast<std::uintptr_t>(memory) % kChunk) % kChunk;
  const std::uint64_t first = start <= head ? head : head + (start - head + kChunk - 1) / kChunk * kChunk;
  if (start == 0 && bytes >= kLarge * kChunk) page_choice().try_huge();
  for (std::uint64_t chunk = first; chunk < stop && chunk + kChunk <= bytes; chunk += kChunk) {
    if (has_page(memory + chunk) || has_page(memory + chunk + kChunk - kPageSize)) continue;
    populate(memory + chunk, kChunk, page_choice().huge());
  }
}

}  // namespace nvme_ops
