// A thread, started when first needed, that runs tasks in the order they came.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
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

  // Tasks on their way. They are made where no memory can still be an error, so that handing them over is none.
  using Tasks = std::list<std::function<void()>>;
  static Tasks task(std::function<void()> function) {
    Tasks tasks;
    tasks.push_back(std::move(function));
    return tasks;
  }

  // Throws std::system_error where no thread can be had; so does post() when it is the first.
  void start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_locked();
  }

  void post(std::function<void()> function) { post(task(std::move(function))); }
  void post(Tasks&& tasks) {  // which stay with the caller when it throws
    const std::lock_guard<std::mutex> lock(mutex_);
    start_locked();
    const std::lock_guard<std::mutex> queue_lock(queue_->mutex);
    queue_->tasks.splice(queue_->tasks.end(), tasks);
    queue_->wake.notify_one();
  }

  // Runs what was posted, by those tasks too, then ends the thread. A later post() starts another.
  void stop() {
    for (;;) {
      std::thread ending;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!thread_.joinable()) return;
        const std::lock_guard<std::mutex> queue_lock(queue_->mutex);
        queue_->ending = true;
        queue_->wake.notify_one();
        ending = std::move(thread_);
      }
      // Called by one of its own tasks, it ends when that task does.
      ending.get_id() == std::this_thread::get_id() ? ending.detach() : ending.join();
    }
  }

private:
  // Shared with the thread, which may outlive the worker when a task destroys it.
  struct Queue {
    std::mutex mutex;
    std::condition_variable wake;
    Tasks tasks;
    bool ending = false, ended = false;
  };

  void start_locked() {
    if (thread_.joinable()) return;
    auto queue = std::make_shared<Queue>();
    // A thread that still ends has tasks left, which come before those of the new one.
    thread_ = quiet_thread([queue, before = queue_] {
      if (before) {
        std::unique_lock<std::mutex> lock(before->mutex);
        before->wake.wait(lock, [&] { return before->ended; });
      }
      serve(*queue);
    });
    queue_ = std::move(queue);
  }

  static void serve(Queue& queue) {
    std::unique_lock<std::mutex> lock(queue.mutex);
    for (;;) {
      queue.wake.wait(lock, [&] { return queue.ending || !queue.tasks.empty(); });
      if (queue.tasks.empty()) {
        queue.ended = true;
        queue.wake.notify_all();
        return;
      }
      Tasks next;
      next.splice(next.end(), queue.tasks, queue.tasks.begin());
      lock.unlock();
      next.front()();
      next.clear();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace nvme_ops
