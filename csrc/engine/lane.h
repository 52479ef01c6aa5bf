// One queue kept full: takes shares, plans pieces, submits them, judges every completion. Used by one thread at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "engine/split.h"
#include "engine/staging.h"

namespace nvme_ops {

struct LaneOptions {
  std::vector<const Backend*> backends;  // to try, best first
  std::uint64_t block_size;
  std::uint64_t queue_depth;
  bool single_submit;   // one system call per request, against one per batch
  bool overlap_events;  // refill the queue after every completion, against after an eighth of it
  std::shared_ptr<StagingBudget> staging;
  std::shared_ptr<std::atomic<const Backend*>> in_use;  // told which backend opened
};

class Lane {
  struct ActiveShare;

public:
  explicit Lane(LaneOptions options);

  // Shares on their way to a lane. Made where no memory can still be an error; from then on nothing allocates that a
  // share could not fail by.
  using Shares = std::list<ActiveShare>;
  static Shares ready(Share share);

  void add(Shares shares) noexcept;
  bool busy() const { return !planning_.empty() || !draining_.empty(); }

  // Plans and submits what fits, then collects completions, waiting at most `timeout` when there is nothing else to do.
  // Returns false when the wait brought nothing: a good moment to look for signals. `blocking`: the thread that drives
  // the lane has nothing else to take in, so it may serve a lone small request itself.
  bool step(std::chrono::milliseconds timeout, bool blocking = false) noexcept;

  // Nothing is in flight: gives the staging memory back.
  void rest() noexcept;

  std::size_t staging_bytes() const { return staging_.held_bytes(); }

private:
  struct ActiveShare {
    Share share;
    std::size_t extent;      // where planning stands
    std::uint64_t position;  // in that extent
    std::uint64_t moved = 0;
    unsigned in_flight = 0;
    unsigned turn = 0;     // pieces planned since it had its turn
    bool planned = false;  // to its end
    SharedFile* held = nullptr;
    bool entered = false;  // holds the extent's file, which is prepared
    unsigned denied = 0;   // descriptors, in a row
    Shares::iterator self = {};
  };
  // A part of an extent on its way. What a short or refused transfer leaves of it is planned again, in the same place.
  struct Flight {
    ActiveShare* share;
    std::size_t extent;
    std::uint64_t position;  // of the wanted bytes in the extent
    std::uint64_t bytes;     // wanted
    Piece piece;             // of them, at their start, in flight
    StagingBlock block;
    Request request;
    unsigned retries;
    bool gated;
  };
  // Gated: writes of the other kind are under way where the piece would meet them, or its memory has no pages yet.
  enum class Planned { Piece, Copied, Stalled, Gated, Nothing };

  bool open_queue();
  void reserve();
  bool plan();  // true: there is more that could be planned at once
  Planned plan_next();
  Planned plan_remainder();
  Planned plan_share(ActiveShare& active);
  Planned enter_extent(ActiveShare& active);
  Planned denied(ActiveShare& active, Failure failure);
  Planned plan_piece(unsigned slot, std::uint64_t* advanced);
  std::uint64_t read_cached(const Extent& extent, std::uint64_t position, std::uint64_t bytes);
  bool stage(Flight& flight);
  bool registered(const StagingBlock& block);
  bool pass_gate(Flight& flight);
  void leave_gate(Flight& flight);
  void submit();
  void drop_stopped();
  bool serve_alone();
  void complete(const Completion& completion);
  std::uint64_t judge(Flight& flight, std::int64_t result);
  void release(unsigned slot);
  void end_planning(ActiveShare& active);
  void finish_shares();

  const LaneOptions options_;
  const unsigned depth_;
  const std::size_t reap_at_once_;  // then the queue is fed again
  std::unique_ptr<Queue> queue_;
  StagingArea staging_;
  std::vector<bool> registered_;  // by staging chunk
  bool may_register_ = true;      // until locked memory is refused
  Shares planning_, draining_, ended_;
  std::vector<Flight> flights_;
  std::vector<unsigned> free_flights_;
  std::vector<unsigned> remainders_;  // flights to be planned again
  std::vector<unsigned> ready_;       // planned, not yet taken by the queue
  unsigned in_kernel_ = 0;
  bool pause_ = false;        // the kernel had no room for something
  bool at_gate_ = false;      // all there is to plan waits for other threads
  std::uint64_t copied_ = 0;  // since the queue was last fed
};

}  // namespace nvme_ops
