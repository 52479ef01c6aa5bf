// Turns shares into requests: whose turn it is (Schedule), which piece comes next (split.h), by which route, and what
// it needs before it may go. Has no queue, so that it can be tested without one. Used by one thread at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "engine/admission.h"
#include "engine/counters.h"
#include "engine/residency.h"
#include "engine/schedule.h"
#include "engine/split.h"
#include "engine/staging.h"

namespace nvme_ops {

using Clock = std::chrono::steady_clock;

// A share that a lane has taken.
struct ActiveShare {
  Share share;
  std::size_t extent;      // where planning stands
  std::uint64_t position;  // in that extent
  Clock::time_point arrived;
  bool begun = false;  // a piece of it was planned
  std::uint64_t moved = 0;
  unsigned in_flight = 0;
  unsigned turn = 0;     // pieces planned in the present turn
  bool planned = false;  // every piece was planned
  SharedFile* held = nullptr;
  bool entered = false;      // holds the extent's file, which is prepared
  bool in_a_row = false;     // continues other small reads: through the page cache
  unsigned denied = 0;       // consecutive failures to get a descriptor
  Residency residency = {};  // of the extent
  std::list<ActiveShare>::iterator self = {};

  Priority priority() const { return share.job->priority(); }
};

// A part of an extent in flight. What a short or refused transfer leaves of it is planned again, in the same slot.
struct Flight {
  ActiveShare* share;
  std::size_t extent;
  std::uint64_t position;  // of the wanted bytes in the extent
  std::uint64_t bytes;     // wanted
  Piece piece = {};        // in flight: the first part of the wanted bytes
  StagingBlock block = {};
  Request request = {};
  unsigned retries = 0;
  bool gated = false;     // has entered its folios, see folio_gate.h
  bool admitted = false;  // was admitted, see admission.h
  Clock::time_point submitted = {};

  Job& job() const { return *share->share.job; }
  const Extent& in() const { return job().extents()[extent]; }
};

class Planner {
public:
  using Shares = std::list<ActiveShare>;
  // Starts shares on another lane; false, and they are left, if it has no thread.
  using Help = std::function<bool(Shares&)>;

  Planner(std::uint64_t block_size, unsigned depth, std::shared_ptr<StagingBudget> staging,
          std::shared_ptr<Admission> admission, Counters* counters, Help help = {})
      : block_size_(block_size),
        depth_(depth),
        staging_(std::move(staging)),
        admission_(std::move(admission)),
        counters_(counters),
        help_(std::move(help)) {}

  // Shares to be added, allocated where that can still fail: afterwards nothing allocates in a way that could lose one.
  static Shares ready(Share share);

  // Allocates for all that can be in flight, so that no transfer needs memory later. Throws std::bad_alloc.
  void reserve();

  void add(Shares shares) noexcept { schedule_.add(std::move(shares)); }
  bool busy() const { return !schedule_.empty() || !draining_.empty(); }
  bool all_planned() const { return schedule_.empty(); }

  // Plans what there is room for, into ready(). Returns true if more could be planned at once.
  bool plan();

  // Slots of flights to be submitted, in order. Whoever submits them removes them.
  std::vector<unsigned>& ready() { return ready_; }
  Flight& flight(std::uint64_t slot) { return flights_[slot]; }

  // Ends a flight: `got` of the wanted bytes were moved.
  void end(unsigned slot, std::uint64_t got);

  // Ends flights that are not submitted and whose jobs have failed or were interrupted: they need not wait for a queue.
  void drop_stopped();
  // Fails every share, when no queue can be opened.
  void fail_all(const Failure& failure);
  // Tells the jobs of shares that have ended.
  void finish_shares();

  // Returns whether to wait a moment before planning again: for other threads; for a kernel short of resources.
  bool take_at_gate() { return std::exchange(at_gate_, false); }
  bool take_pause() { return std::exchange(pause_, false); }
  void pause() { pause_ = true; }

  StagingArea& staging() { return staging_; }
  const StagingArea& staging() const { return staging_; }

private:
  // Gated: it waits for writes of the other kind in its folios, for pages, for more urgent requests, or its own job.
  enum class Planned { Piece, Copied, Stalled, Gated, Nothing };

  Planned plan_next();
  Planned plan_remainder();
  Planned plan_share(ActiveShare& active);
  Planned enter_extent(ActiveShare& active);
  void divide(ActiveShare& active) noexcept;
  bool in_a_row(const Job& job, const Extent& extent);
  Planned denied(ActiveShare& active, Failure failure);
  Planned plan_piece(unsigned slot, std::uint64_t* advanced);
  std::uint64_t read_cached(ActiveShare& active, const Extent& extent, std::uint64_t position, std::uint64_t bytes);
  bool stage(Flight& flight);
  bool pass_gates(Flight& flight);
  void give_back(Flight& flight);  // its admission, its folios, its staging block
  void release(unsigned slot);
  void end_planning(ActiveShare& active);
  bool idle() const { return free_flights_.size() + remainders_.size() == flights_.size(); }  // nothing will end

  const std::uint64_t block_size_;
  const unsigned depth_;
  StagingArea staging_;
  const std::shared_ptr<Admission> admission_;
  Counters* const counters_;
  const Help help_;
  Schedule<ActiveShare> schedule_;
  Shares draining_, ended_;
  std::vector<Flight> flights_;
  std::vector<unsigned> free_flights_;
  std::vector<unsigned> remainders_;  // flights to be planned again
  std::vector<unsigned> ready_;
  bool pause_ = false;
  bool at_gate_ = false;      // everything left to plan waits for other threads
  std::uint64_t copied_ = 0;  // since plan() began
  struct Row {
    std::uint64_t inode = 0, end = 0;
    unsigned reads = 0;
  };
  std::array<Row, 16> rows_;  // of small reads: the latest of some files
};

// Copies between a flight's staging block and its memory: into the block for Op::Write, out of it for Op::Read.
void copy_staged(const Flight& flight, std::byte* block, std::uint64_t bytes);

}  // namespace nvme_ops
