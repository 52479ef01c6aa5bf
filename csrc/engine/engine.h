// The lanes of one handle: one for blocking calls, served by the caller's own thread, and one with a thread for each of
// intra_op_parallelism, started when needed. If that is automatic, a job has the first lane, and the last as well for a
// large cached read (Planner::divide); cached reads into an accelerator have them all.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/limits.h"
#include "engine/job.h"
#include "engine/lane.h"

namespace nvme_ops {

// Polled while a thread waits; true stops the operation.
using Interrupted = std::function<bool()>;

class Engine {
public:
  explicit Engine(const EngineOptions& options);
  ~Engine();  // finishes submitted jobs. Never call it in a forked child, which lacks the lanes' threads

  // Runs a job on this thread, or, if another one is doing so, on the lane threads; returns when it has ended. Throws
  // IoError if interrupted. `interrupted` may fork: the child gets an IoError, the job goes on in the parent.
  void run(const std::shared_ptr<Job>& job, const Interrupted& interrupted);

  // Starts a job on the lane threads and returns. If no thread can be started, this one does it before returning.
  void submit(const std::shared_ptr<Job>& job);

  // Returns the lanes for a cached read into an accelerator, which is faster than one processor copies; 0: as usual.
  std::uint64_t lanes_for_cached(std::uint64_t bytes) const {
    return options_.automatic ? std::min<std::uint64_t>(bytes / kLaneBytes, threads_.size()) : 0;
  }

  // Returns whether submit() returns at once: there is a thread, or one could be started.
  bool has_thread() noexcept;

  std::size_t staging_bytes() const;
  Statistics statistics() const;
  const char* backend() const { return options_.in_use->load()->name; }

private:
  class LaneThread;

  void run_inline(const std::shared_ptr<Job>& job, const Interrupted& interrupted);
  bool start(std::size_t lane, Lane::Shares& shares) noexcept;
  Planner::Help last_lane();  // for other lanes

  const LaneOptions options_;
  std::mutex inline_mutex_;
  Lane inline_lane_;
  std::vector<std::unique_ptr<LaneThread>> threads_;
  std::mutex submit_mutex_;
  std::size_t next_ = 0;  // where the next job's first share goes
};

// Waits for the job to end; an interruption stops it and throws IoError. As for Engine::run, `interrupted` may fork.
void wait(Job& job, const Interrupted& interrupted);

Failure interrupted_failure();

// Throws IoError when this process is not the one with that fork_generation().
void require_process(unsigned long generation);

}  // namespace nvme_ops
