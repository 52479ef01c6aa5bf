// A thread, started when first needed, that runs tasks in order.
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
  ~Worker() { stop(); }

  // Tasks to be posted, allocated where running out of memory can still be reported: posting them cannot fail so.
  using Tasks = std::list<std::function<void()>>;
  static Tasks task(std::function<void()> function) {
    Tasks tasks;
    tasks.push_back(std::move(function));
    return tasks;
  }

  // Throws std::system_error if no thread can be started; so does post() when it is the first.
  void start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_locked();
  }

  void post(std::function<void()> function) { post(task(std::move(function))); }
  void post(Tasks&& tasks) {  // the caller keeps the tasks if this throws
    const std::lock_guard<std::mutex> lock(mutex_);
    start_locked();
    const std::lock_guard<std::mutex> queue_lock(queue_->mutex);
    queue_->tasks.splice(queue_->tasks.end(), tasks);
    queue_->wake.notify_one();
  }

  // Runs all posted tasks, including those posted by them, then ends the thread. A later post() starts another.
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
      // If called by one of its own tasks, the thread ends after that task.
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
    // A thread that is ending may have tasks left, which go before those of the new one.
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
