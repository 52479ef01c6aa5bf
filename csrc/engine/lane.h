// Keeps one queue full, and judges every completion. Used by one thread at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/backend.h"
#include "engine/counters.h"
#include "engine/planner.h"

namespace nvme_ops {

struct EngineOptions {
  std::vector<const Backend*> backends;  // to try, best first
  std::uint64_t block_size;
  std::uint64_t queue_depth;
  bool single_submit;   // one system call per request, against one per batch
  bool overlap_events;  // refill the queue after every completion, against after an eighth of it
  std::uint64_t lanes;
  bool automatic = false;  // of the lanes a job has as many as help, mostly one, unless its tool says how many
};

// What the lanes of an engine share.
struct LaneOptions : EngineOptions {
  std::shared_ptr<StagingBudget> staging;
  std::shared_ptr<Admission> admission;
  std::shared_ptr<std::atomic<const Backend*>> in_use;  // told which backend opened
};

class Lane {
public:
  explicit Lane(LaneOptions options, Planner::Help help = {});

  using Shares = Planner::Shares;

  void add(Shares shares) noexcept { planner_.add(std::move(shares)); }
  bool busy() const { return planner_.busy(); }

  // Plans and submits what fits, then collects completions, waiting at most `timeout`. Returns false if that brought
  // nothing: look for signals. `blocking`: the thread has no other work, so it may serve a lone small request itself.
  bool step(std::chrono::milliseconds timeout, bool blocking = false) noexcept;

  // Releases the staging memory. Call when nothing is in flight.
  void rest() noexcept;

  std::size_t staging_bytes() const { return planner_.staging().held_bytes(); }
  const Counters& counters() const { return counters_; }

private:
  struct Chunk {
    bool used = false, registered = false;
  };

  bool open_queue();
  bool registered(const StagingBlock& block);
  void submit();
  void note_submitted(Flight& flight, Clock::time_point now);
  bool serve_alone();
  void complete(const Completion& completion, Clock::time_point now);
  std::uint64_t judge(Flight& flight, std::int64_t result);

  const LaneOptions options_;
  const std::size_t reap_at_once_;  // completions collected before the queue is refilled
  Counters counters_;
  Planner planner_;
  std::unique_ptr<Queue> queue_;
  std::vector<Chunk> chunks_;  // of the staging memory
  bool may_register_ = true;   // until the system refuses to lock memory
  unsigned in_kernel_ = 0;
};

}  // namespace nvme_ops
