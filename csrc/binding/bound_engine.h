// An engine as Python holds it: recreated after a fork, with its operations and the threads for several steps.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/limits.h"
#include "binding/device_path.h"
#include "binding/operation.h"
#include "binding/python.h"
#include "engine/worker.h"

namespace nvme_ops {

// Threads for transfers of several steps. Large ones take turns: one keeps storage busy; small ones must overlap.
class Service {
public:
  Worker& of(const Transfer& transfer) {
    std::uint64_t bytes = 0;
    for (const DeviceExtent& extent : transfer.device) bytes += extent.bytes;
    if (transfer.validate || bytes > kLarge) return workers_[0];
    next_ = next_ % (workers_.size() - 1) + 1;
    return workers_[next_];
  }

private:
  static constexpr std::uint64_t kLarge = 32 << 20;

  std::array<Worker, 4> workers_;
  std::size_t next_ = 0;
};

// Everything here is accessed only while holding the GIL, so a forked child finds it consistent.
class BoundEngine {
public:
  BoundEngine(EngineOptions options, Cache cache, std::shared_ptr<Learner> learner)
      : options_(std::move(options)), cache_(cache), learner_(std::move(learner)) {
    running();  // reads its environment variables now
    all().insert(this);
  }
  ~BoundEngine() {
    finish();
    all().erase(this);
  }

  // Lets every engine do something, which may run Python code, or other threads, that drop one.
  static void for_each(void (BoundEngine::*act)()) {
    const std::set<BoundEngine*> now = all();
    for (BoundEngine* engine : now) {
      if (all().count(engine) != 0) (engine->*act)();
    }
  }

  Engine& engine() { return *running().engine; }

  // What an engine that learns chooses for a transfer, and measures; empty for others.
  Sample sample(Op op, Priority priority, const Memory* memories, std::size_t count, bool waited, bool measured) {
    if (learner_ || !waited) sweep();
    if (!learner_) return {};
    return Sample(learner_, op, priority, memories, count, waited, measured);
  }
  Tool tool(const Sample& sample) const {
    if (sample) return sample.tool();
    Tool tool;
    tool.cache = cache_;
    return tool;
  }

  std::uint64_t run(const Transfer& transfer, bool all_lanes, Sample sample) {
    Running& current = running();
    const std::shared_ptr<Engine> engine = current.engine;
    const std::shared_ptr<DevicePath> path = current.device_path;
    std::uint64_t moved;
    Sample::Clock::time_point end;
    {
      const WithoutGil released;
      moved = transfer.execute(*engine, *path, sample ? transfer.job->tool().lanes > 1 : all_lanes, signal_raised);
      end = Sample::Clock::now();
    }
    sample.end(true, end, transfer.job->cached());
    return moved;
  }

  std::shared_ptr<Operation> submit(Transfer transfer, std::vector<Memory> memories, Sample sample) {
    Running& current = running();
    if (transfer.plain()) {
      const std::shared_ptr<Engine> engine = current.engine;
      const std::shared_ptr<Job> job = transfer.job;
      auto operation = std::make_shared<Operation>(job->outcome(), job, std::move(memories), std::move(sample));
      live_.push_back(operation);
      try {
        if (engine->has_thread()) {
          engine->submit(job);
        } else {  // no thread: the calling thread does it all
          const WithoutGil released;
          engine->submit(job);
        }
      } catch (...) {  // nothing was started
        live_.remove(operation);
        throw;
      }
      return operation;
    }
    auto outcome = std::make_shared<Outcome>();
    auto operation = std::make_shared<Operation>(outcome, transfer.job, std::move(memories), std::move(sample));
    Worker& service = current.service->of(transfer);
    Worker::Tasks task = Worker::task([engine = current.engine, path = current.device_path, outcome,
                                       transfer = std::make_shared<Transfer>(std::move(transfer))]() mutable noexcept {
      std::uint64_t moved = 0;
      std::optional<Failure> failure;
      try {
        moved = transfer->execute(*engine, *path, true, [] { return false; });
      } catch (...) {
        failure = current_failure();
      }
      transfer.reset();  // closes its files before the outcome is announced
      failure ? outcome->fail(std::move(*failure)) : outcome->succeed(moved);
    });
    live_.push_back(operation);
    try {
      service.post(std::move(task));
    } catch (const std::exception&) {  // no further thread to be had: the calling thread does it all
      const WithoutGil released;
      task.front()();
    }
    return operation;
  }

  // Releases the memory of operations that have ended, even if nobody holds their future.
  void sweep() {
    std::list<std::shared_ptr<Operation>> ended;  // releasing runs Python code, which may call this again
    for (auto operation = live_.begin(); operation != live_.end();) {
      const auto next = std::next(operation);
      if ((*operation)->outcome->done()) ended.splice(ended.end(), live_, operation);
      operation = next;
    }
    for (const auto& operation : ended) operation->end();
  }

  DevicePath::Statistics paths() { return running().device_path->statistics(); }

  // Waits for all operations and ends the threads. A signal stops those that have not been started.
  void finish() {
    const std::list<std::shared_ptr<Operation>> ending = std::exchange(live_, {});
    if (running_.engine && running_.generation != fork_generation()) return leave_to_parent();
    Running stopping = std::exchange(running_, {});
    const WithoutGil released;
    for (const auto& operation : ending) {
      while (!operation->outcome->wait_for(std::chrono::milliseconds(kInterruptMilliseconds))) {
        const bool raised = signal_raised();
        if (stopping.generation != fork_generation()) {  // a handler forked, and this is the child
          stopping.leave_to_parent();
          return;
        }
        if (!raised) continue;
        const WithGil gil;
        PyErr_WriteUnraisable(nullptr);
        for (const auto& other : ending) other->job->fail(interrupted_failure());
      }
    }
    stopping = {};
  }

private:
  static std::set<BoundEngine*>& all() {
    static auto* const engines = new std::set<BoundEngine*>;
    return *engines;
  }

  struct Running {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<DevicePath> device_path;
    std::unique_ptr<Service> service;
    unsigned long generation = 0;

    // Leaked on purpose: the threads are the parent's, and the rings are in use there.
    void leave_to_parent() {
      new std::shared_ptr<Engine>(std::move(engine));
      new std::shared_ptr<DevicePath>(std::move(device_path));
      static_cast<void>(service.release());
      *this = {};
    }
  };

  // Returns the engine of this process; a forked child leaves its parent's alone and makes a new one at first use.
  Running& running() {
    if (running_.engine && running_.generation == fork_generation()) return running_;
    if (running_.engine) leave_to_parent();
    running_ = {std::make_shared<Engine>(options_), make_device_path(options_), std::make_unique<Service>(),
                fork_generation()};
    return running_;
  }

  void leave_to_parent() {
    live_.clear();
    running_.leave_to_parent();
  }

  const EngineOptions options_;
  const Cache cache_;
  const std::shared_ptr<Learner> learner_;
  Running running_;
  std::list<std::shared_ptr<Operation>> live_;
};

}  // namespace nvme_ops
