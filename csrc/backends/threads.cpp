// pread(2) and pwrite(2) on threads: works everywhere, and is what the others are measured against.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "backends/registry.h"
#include "base/thread.h"
#include "base/transfer.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kMostThreads = 16;

class ThreadsQueue final : public Queue {
public:
  explicit ThreadsQueue(const QueueOptions& options)
      : most_threads_(std::min<std::size_t>(options.depth, kMostThreads)) {}

  ~ThreadsQueue() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::size_t submit(const Request* requests, std::size_t count) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_threads(requests_.size() + busy_ + count);
    if (threads_.empty()) {  // not one could be started: slow, but it works
      for (std::size_t i = 0; i < count; ++i) completions_.push_back({requests[i].token, transfer(requests[i])});
      return count;
    }
    requests_.insert(requests_.end(), requests, requests + count);
    count == 1 ? work_.notify_one() : work_.notify_all();
    return count;
  }

  std::size_t reap(Completion* completions, std::size_t most, std::size_t least,
                   std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (completions_.size() < least) {
      least_ = least;
      done_.wait_for(lock, timeout, [&] { return completions_.size() >= least; });
    }
    const std::size_t count = std::min(most, completions_.size());
    std::copy_n(completions_.begin(), count, completions);
    completions_.erase(completions_.begin(), completions_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

private:
  void start_threads(std::size_t wanted) {
    try {
      while (threads_.size() < std::min(most_threads_, wanted)) threads_.push_back(quiet_thread([this] { serve(); }));
    } catch (const std::system_error&) {  // a limit on threads: those there are do the work
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const Request request = requests_.front();
      requests_.pop_front();
      ++busy_;
      lock.unlock();
      const Completion completion{request.token, transfer(request)};
      lock.lock();
      --busy_;
      completions_.push_back(completion);
      if (completions_.size() >= least_) done_.notify_one();
    }
  }

  const std::size_t most_threads_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Request> requests_;
  std::deque<Completion> completions_;
  std::vector<std::thread> threads_;
  std::size_t busy_ = 0;
  std::size_t least_ = 1;
  bool closing_ = false;
};

}  // namespace

const Backend kThreads{
    "threads", [] { return Probe{true, {}}; },
    [](const QueueOptions& options) -> std::unique_ptr<Queue> { return std::make_unique<ThreadsQueue>(options); }};

}  // namespace nvme_ops
