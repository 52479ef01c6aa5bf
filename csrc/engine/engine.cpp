#include "engine/engine.h"

#include <condition_variable>
#include <thread>

#include "base/fork.h"
#include "base/thread.h"
#include "engine/admission.h"

namespace nvme_ops {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kLinger(50);

LaneOptions lane_options(const EngineOptions& options) {
  const std::size_t chunks = kStagingBytes / StagingArea::kChunk;
  const std::size_t guaranteed = std::min<std::size_t>(chunks, options.lanes + 1);
  return {options, std::make_shared<StagingBudget>(chunks - guaranteed), std::make_shared<Admission>(),
          std::make_shared<std::atomic<const Backend*>>(options.backends.front())};
}

// A signal handler may fork: jobs in flight then go on in the parent only.
bool ask(const Interrupted& interrupted, unsigned long generation) {
  const bool stop = interrupted();
  if (!stop) require_process(generation);
  if (generation != fork_generation()) raise(interrupted_failure());
  return stop;
}

}  // namespace

// A lane with the thread that drives it.
class Engine::LaneThread {
public:
  LaneThread(const LaneOptions& options, Planner::Help help) : lane_(options, std::move(help)) {}

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

  // Throws if no thread can be started; the caller then keeps the shares.
  void add(Lane::Shares& shares) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) thread_ = quiet_thread([this] { drive(); });
      started_.store(true, std::memory_order_relaxed);
      incoming_.splice(incoming_.end(), shares);
      arrived_.store(true, std::memory_order_release);
      if (!asleep_) return;
    }
    wake_.notify_one();
  }

  bool started() const { return started_.load(std::memory_order_relaxed); }
  std::size_t staging_bytes() const { return lane_.staging_bytes(); }
  const Counters& counters() const { return lane_.counters(); }

private:
  void drive() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (incoming_.empty() && !lane_.busy()) {
        lock.unlock();  // releasing memory takes long enough to hold up a caller
        lane_.rest();
        linger();
        lock.lock();
        asleep_ = true;
        wake_.wait(lock, [this] { return closing_ || !incoming_.empty(); });
        asleep_ = false;
        if (incoming_.empty()) return;
        lock.unlock();  // lets the caller run first if waking this thread preempted it
        std::this_thread::yield();
        lock.lock();
      }
      arrived_.store(false, std::memory_order_relaxed);
      lane_.add(std::move(incoming_));
      lock.unlock();
      lane_.step(milliseconds(kInterruptMilliseconds));
      lock.lock();
    }
  }

  // A caller that waits for one transfer after another submits again at once, and then need not wake this thread.
  void linger() {
    const auto end = Clock::now() + kLinger;
    while (!arrived_.load(std::memory_order_acquire) && Clock::now() < end) std::this_thread::yield();
  }

  Lane lane_;
  std::atomic<bool> started_{false}, arrived_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  Lane::Shares incoming_;
  std::thread thread_;
  bool asleep_ = false;
  bool closing_ = false;
};

Engine::Engine(const EngineOptions& options)
    : options_(lane_options(options)), inline_lane_(options_, options_.automatic ? last_lane() : Planner::Help()) {
  for (std::uint64_t i = 0; i < options.lanes; ++i) {
    threads_.push_back(
        std::make_unique<LaneThread>(options_, options_.automatic && i == 0 ? last_lane() : Planner::Help()));
  }
}

Planner::Help Engine::last_lane() {
  return [this](Lane::Shares& shares) {
    try {
      threads_.back()->add(shares);
      return true;
    } catch (const std::exception&) {  // no thread
      return false;
    }
  };
}

Engine::~Engine() {
  for (auto& thread : threads_) thread.reset();  // the first before the one that helps it
}

void Engine::run(const std::shared_ptr<Job>& job, const Interrupted& interrupted) {
  if (job->priority() == Priority::Demand) note_demand();
  const std::unique_lock<std::mutex> lock(inline_mutex_, std::try_to_lock);
  if (lock.owns_lock()) return run_inline(job, interrupted);
  submit(job);
  wait(*job, interrupted);
}

void Engine::run_inline(const std::shared_ptr<Job>& job, const Interrupted& interrupted) {
  Lane::Shares share = Planner::ready(split(job, 1).front());
  job->expect_shares(1);
  inline_lane_.add(std::move(share));
  const unsigned long generation = fork_generation();
  auto asked = Clock::now();
  bool stop = false;
  while (inline_lane_.busy()) {
    const bool progress = inline_lane_.step(milliseconds(kInterruptMilliseconds), true);
    const auto now = Clock::now();
    if (stop || !inline_lane_.busy() || (progress && now - asked < milliseconds(kInterruptMilliseconds))) continue;
    asked = now;
    stop = ask(interrupted, generation);
    if (stop) job->fail(interrupted_failure());
  }
  inline_lane_.rest();
  wait(*job, [&] { return !stop && interrupted(); });  // for a lane that helps
  if (stop) raise(interrupted_failure());
}

void Engine::submit(const std::shared_ptr<Job>& job) {
  if (job->priority() == Priority::Demand) note_demand();
  const std::uint64_t wanted = job->tool().lanes;
  const std::size_t usual = options_.automatic ? 1 : threads_.size();
  const std::size_t lanes = wanted == 0 ? usual : std::min<std::size_t>(wanted, threads_.size());
  std::vector<Share> shares = split(job, lanes);
  std::vector<Lane::Shares> ready;
  ready.reserve(shares.size());
  for (Share& share : shares) ready.push_back(Planner::ready(share));
  std::size_t lane;
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    lane = next_;
    next_ = (next_ + shares.size()) % threads_.size();
    lane %= lanes;
  }
  // From here on every failure belongs to the job.
  job->expect_shares(ready.size());
  if (ready.size() > 1) {
    for (Lane::Shares& share : ready) share.front().share.claim_files();
  }
  for (Lane::Shares& share : ready) {
    if (start(lane++ % lanes, share)) continue;
    const std::lock_guard<std::mutex> lock(inline_mutex_);
    inline_lane_.add(std::move(share));
    while (inline_lane_.busy()) inline_lane_.step(milliseconds(kInterruptMilliseconds));
    inline_lane_.rest();
  }
}

// Starts shares on the thread of that lane, or on another if the system allows no more threads.
bool Engine::start(std::size_t lane, Lane::Shares& shares) noexcept {
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    try {
      threads_[(lane + i) % threads_.size()]->add(shares);
      return true;
    } catch (const std::exception&) {  // no thread
    }
  }
  return false;
}

bool Engine::has_thread() noexcept {
  for (const auto& thread : threads_) {
    if (thread->started()) return true;
  }
  Lane::Shares none;
  return start(0, none);
}

std::size_t Engine::staging_bytes() const {
  std::size_t bytes = inline_lane_.staging_bytes();
  for (const auto& thread : threads_) bytes += thread->staging_bytes();
  return bytes;
}

Statistics Engine::statistics() const {
  Statistics sum;
  add(sum, inline_lane_.counters());
  for (const auto& thread : threads_) add(sum, thread->counters());
  return sum;
}

void wait(Job& job, const Interrupted& interrupted) {
  const unsigned long generation = fork_generation();
  bool stop = false;
  while (!job.outcome()->wait_for(milliseconds(kInterruptMilliseconds))) {
    if (stop) continue;
    stop = ask(interrupted, generation);
    if (stop) job.fail(interrupted_failure());
  }
  if (stop) raise(interrupted_failure());
}

Failure interrupted_failure() {
  return {Failure::Kind::Interrupted, 0, "interrupted", {}};
}

void require_process(unsigned long generation) {
  if (generation == fork_generation()) return;
  raise(unavailable("submitted before this process was forked: only the parent can wait for it"));
}

}  // namespace nvme_ops
