// pread(2) and pwrite(2) on threads: works everywhere, and is the baseline for the others.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backends/registry.h"
#include "base/thread.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kMaxThreads = 16;

// A FIFO with preallocated memory: there is always room for what may be in flight.
template <class Item>
class Ring {
public:
  explicit Ring(std::size_t capacity) : items_(capacity) {}
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void push(const Item& item) { items_[(first_ + size_++) % items_.size()] = item; }
  Item pop() {
    const std::size_t at = std::exchange(first_, (first_ + 1) % items_.size());
    --size_;
    return items_[at];
  }

private:
  std::vector<Item> items_;
  std::size_t first_ = 0, size_ = 0;
};

class ThreadsQueue final : public Queue {
public:
  explicit ThreadsQueue(const QueueOptions& options)
      : max_threads_(std::min<std::size_t>(options.depth, kMaxThreads)),
        requests_(options.depth),
        completions_(options.depth) {
    threads_.reserve(max_threads_);
  }

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
    if (threads_.empty()) {  // no thread could be started: slow, but it works
      for (std::size_t i = 0; i < count; ++i) completions_.push({requests[i].token, transfer(requests[i])});
      return count;
    }
    for (std::size_t i = 0; i < count; ++i) requests_.push(requests[i]);
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
    for (std::size_t i = 0; i < count; ++i) completions[i] = completions_.pop();
    return count;
  }

private:
  void start_threads(std::size_t wanted) {
    try {
      while (threads_.size() < std::min(max_threads_, wanted)) threads_.push_back(quiet_thread([this] { serve(); }));
    } catch (const std::exception&) {  // a limit on threads or memory: the threads there are do the work
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const Request request = requests_.pop();
      ++busy_;
      lock.unlock();
      const Completion completion{request.token, transfer(request)};
      lock.lock();
      --busy_;
      completions_.push(completion);
      if (completions_.size() >= least_) done_.notify_one();
    }
  }

  const std::size_t max_threads_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  Ring<Request> requests_;
  Ring<Completion> completions_;
  std::vector<std::thread> threads_;
  std::size_t busy_ = 0;
  std::size_t least_ = 1;
  bool closing_ = false;
};

}  // namespace

const Backend kThreads{"threads", [] { return Probe{true, {}}; }, open_queue<ThreadsQueue>};

}  // namespace nvme_ops
