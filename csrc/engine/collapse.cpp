#include "engine/collapse.h"

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <list>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "base/limits.h"
#include "base/thread.h"

namespace nvme_ops {
namespace {

constexpr int kMadviseCollapse = 25;                 // MADV_COLLAPSE, Linux 6.1
constexpr unsigned kRounds = 8;                      // while some pages are always being transferred
constexpr std::chrono::milliseconds kBusyPause(10);  // after such a page

}  // namespace

// The thread for all of them, which exists while there is something to do.
class Collapser {
public:
  void add(const std::shared_ptr<Collapse>& collapse) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(collapse);
    if (running_) return;
    try {
      quiet_thread([this] { serve(); }).detach();
      running_ = true;
    } catch (const std::exception&) {
      waiting_.pop_back();
      throw;
    }
  }

private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!waiting_.empty()) {
      Collapse& collapse = *waiting_.front();
      lock.unlock();
      std::this_thread::sleep_until(collapse.due_);
      while (collapse.next()) {
      }
      const bool again = collapse.again();
      lock.lock();
      again ? waiting_.splice(waiting_.end(), waiting_, waiting_.begin()) : waiting_.pop_front();
    }
    running_ = false;
  }

  std::mutex mutex_;
  std::list<std::shared_ptr<Collapse>> waiting_;
  bool running_ = false;
};

Collapse::Collapse(std::byte* begin, std::byte* end, std::chrono::milliseconds delay)
    : begin_(begin), end_(end), next_(begin), due_(Clock::now() + delay), generation_(fork_generation()) {}

std::shared_ptr<Collapse> Collapse::start(std::byte* memory, std::uint64_t bytes,
                                          std::chrono::milliseconds delay) noexcept {
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin >= end) return nullptr;
  try {
    auto collapse =
        std::make_shared<Collapse>(reinterpret_cast<std::byte*>(begin), reinterpret_cast<std::byte*>(end), delay);
    of_this_process<Collapser>().add(collapse);
    return collapse;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void Collapse::stop() noexcept {
  if (generation_ != fork_generation()) return;  // the thread and the holder of the lock are the parent's
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  next_ = end_;
}

bool Collapse::next() {
  const auto start = Clock::now();
  bool busy = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (next_ == end_) return false;
    busy = ::madvise(next_, kHugePage, kMadviseCollapse) != 0 && errno == EAGAIN;
    next_ += kHugePage;
  }
  busy_ |= busy;
  const auto took = Clock::now() - start;
  // Uses at most half of a processor.
  std::this_thread::sleep_for(busy ? std::max<Clock::duration>(took, kBusyPause) : took);
  return true;
}

bool Collapse::again() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(busy_, false) || stopped_ || ++rounds_ == kRounds) return false;
  next_ = begin_;
  due_ = Clock::now() + kDelay;
  return true;
}

}  // namespace nvme_ops
