#include "engine/engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <system_error>
#include <thread>

#include "base/limits.h"
#include "base/thread.h"

namespace nvme_ops {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kLinger(50);

LaneOptions lane_options(const EngineOptions& options) {
  const std::size_t chunks = kStagingBytes / StagingArea::kChunk;
  const std::size_t guaranteed = std::min<std::size_t>(chunks, options.lanes + 1);
  return {options.backends,
          options.block_size,
          options.queue_depth,
          options.single_submit,
          options.overlap_events,
          std::make_shared<StagingBudget>(chunks - guaranteed),
          std::make_shared<std::atomic<const Backend*>>(options.backends.front())};
}

}  // namespace

// A lane and the thread that drives it.
class Engine::LaneThread {
public:
  explicit LaneThread(const LaneOptions& options) : lane_(options) {}

  ~LaneThread() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
      arrived_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void add(Share share) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) thread_ = quiet_thread([this] { drive(); });
      incoming_.push_back(std::move(share));
      arrived_.store(true, std::memory_order_release);
      if (!asleep_) return;
    }
    wake_.notify_one();
  }

  std::size_t staging_bytes() const { return lane_.staging_bytes(); }

  void abandon() noexcept { lane_.abandon(); }

private:
  void drive() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (incoming_.empty() && !lane_.busy()) {
        lock.unlock();  // giving memory back takes long enough to hold up a caller
        lane_.rest();
        linger();
        lock.lock();
        asleep_ = true;
        wake_.wait(lock, [this] { return closing_ || !incoming_.empty(); });
        asleep_ = false;
        if (incoming_.empty()) return;
        lock.unlock();  // if waking pushed the caller off its processor, it goes on first
        std::this_thread::yield();
        lock.lock();
      }
      arrived_.store(false, std::memory_order_relaxed);
      for (; !incoming_.empty(); incoming_.pop_front()) lane_.add(std::move(incoming_.front()));
      lock.unlock();
      lane_.step(milliseconds(kInterruptMilliseconds));
      lock.lock();
    }
  }

  // Whoever waits for one transfer after the other asks again at once, and need not wake anybody then.
  void linger() {
    const auto end = Clock::now() + kLinger;
    while (!arrived_.load(std::memory_order_acquire) && Clock::now() < end) std::this_thread::yield();
  }

  Lane lane_;
  std::atomic<bool> arrived_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Share> incoming_;
  std::thread thread_;
  bool asleep_ = false;
  bool closing_ = false;
};

Engine::Engine(const EngineOptions& options) : options_(lane_options(options)), inline_lane_(options_) {
  for (std::uint64_t i = 0; i < options.lanes; ++i) threads_.push_back(std::make_unique<LaneThread>(options_));
}

Engine::~Engine() = default;

void Engine::run(const std::shared_ptr<Job>& job, const Interrupted& interrupted) {
  std::unique_lock<std::mutex> lock(inline_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    submit(job);
    wait(*job, interrupted);
    return;
  }
  job->expect_shares(1);
  inline_lane_.add(split(job, 1).front());
  auto asked = Clock::now();
  bool stop = false;
  while (inline_lane_.busy()) {
    const bool progress = inline_lane_.step(milliseconds(kInterruptMilliseconds), true);
    const auto now = Clock::now();
    if (stop || !inline_lane_.busy() || (progress && now - asked < milliseconds(kInterruptMilliseconds))) continue;
    asked = now;
    stop = interrupted();
    if (stop) job->fail(interrupted_failure());
  }
  inline_lane_.rest();
  if (stop) raise(interrupted_failure());
}

void Engine::submit(const std::shared_ptr<Job>& job) {
  std::vector<Share> shares = split(job, threads_.size());
  job->expect_shares(shares.size());
  std::size_t lane;
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    lane = next_;
    next_ = (next_ + shares.size()) % threads_.size();
  }
  for (Share& share : shares) {
    try {
      threads_[lane++ % threads_.size()]->add(std::move(share));
    } catch (const std::system_error& error) {
      job->fail(system_failure(error.code().value(), "starting a lane's thread"));
      job->end_share(0);
    }
  }
}

std::size_t Engine::staging_bytes() const {
  std::size_t bytes = inline_lane_.staging_bytes();
  for (const auto& thread : threads_) bytes += thread->staging_bytes();
  return bytes;
}

void Engine::abandon() noexcept {
  inline_lane_.abandon();
  for (const auto& thread : threads_) thread->abandon();
}

void wait(Job& job, const Interrupted& interrupted) {
  bool stop = false;
  while (!job.outcome()->wait_for(milliseconds(kInterruptMilliseconds))) {
    if (stop || !interrupted()) continue;
    stop = true;
    job.fail(interrupted_failure());
  }
  if (stop) raise(interrupted_failure());
}

Failure interrupted_failure() {
  return {Failure::Kind::Interrupted, 0, "interrupted", {}};
}

}  // namespace nvme_ops
