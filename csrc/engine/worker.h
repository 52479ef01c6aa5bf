// A thread, started when first needed, that runs tasks in the order they came.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/thread.h"

namespace nvme_ops {

class Worker {
public:
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() { stop(); }

  // Throws std::system_error where no thread can be had; so does post() when it is the first.
  void start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = quiet_thread([this] { serve(); });
  }

  void post(std::function<void()> task) {
    start();
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    wake_.notify_one();
  }

  // Runs what was posted, then ends the thread. A later post() starts it again.
  void stop() {
    std::thread ending;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) return;
      tasks_.push_back(nullptr);
      wake_.notify_one();
      ending = std::move(thread_);
    }
    // Called by one of its own tasks, it ends when that task does.
    ending.get_id() == std::this_thread::get_id() ? ending.detach() : ending.join();
  }

private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      if (!task) return;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

}  // namespace nvme_ops
