// The lanes of one handle: one for calls that block, served by the caller's own thread, and one thread for each lane of
// intra_op_parallelism, started when the first asynchronous or parallel call needs it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/job.h"
#include "engine/lane.h"

namespace nvme_ops {

struct EngineOptions {
  std::vector<const Backend*> backends;
  std::uint64_t block_size;
  std::uint64_t queue_depth;
  bool single_submit;
  bool overlap_events;
  std::uint64_t lanes;
};

// Asked now and then while a thread waits; true stops the operation.
using Interrupted = std::function<bool()>;

class Engine {
public:
  explicit Engine(const EngineOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();  // finishes what was submitted. Never in the child of a fork: the lanes' threads do not exist there

  // On this thread, with one lane; returns when the job has ended. A second thread's job goes to the lane threads.
  // Throws IoError (Interrupted) when it was interrupted; nothing is in flight then either. `interrupted` may fork: the
  // child gets an IoError, and the job goes on in the parent only.
  void run(const std::shared_ptr<Job>& job, const Interrupted& interrupted);

  // On the lane threads; returns at once. Where the system allows fewer threads than lanes those there are do the work;
  // where it allows none, this thread does, before it returns.
  void submit(const std::shared_ptr<Job>& job);

  // Whether submit() will return at once: there is a thread, or one could be started.
  bool has_thread() noexcept;

  std::size_t staging_bytes() const;
  Statistics statistics() const;
  const char* backend() const { return options_.in_use->load()->name; }

private:
  class LaneThread;

  void run_inline(const std::shared_ptr<Job>& job, const Interrupted& interrupted);
  bool start(std::size_t lane, Lane::Shares& shares) noexcept;

  const LaneOptions options_;
  std::mutex inline_mutex_;
  Lane inline_lane_;
  std::vector<std::unique_ptr<LaneThread>> threads_;
  std::mutex submit_mutex_;
  std::size_t next_ = 0;  // where the next job's first share goes
};

// Waits for the job to end; when `interrupted` says so, stops it, waits for what is in flight and throws IoError. As
// for Engine::run, `interrupted` may fork.
void wait(Job& job, const Interrupted& interrupted);

Failure interrupted_failure();

// Throws IoError when this process is not the one with that fork_generation().
void require_process(unsigned long generation);

}  // namespace nvme_ops
