#include "engine/planner.h"

#include <errno.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/limits.h"
#include "engine/copy.h"
#include "engine/folio_gate.h"

namespace nvme_ops {
namespace {

constexpr std::uint64_t kCopyBurst = 2 * kBlockSize;  // bytes copied before the queue is refilled
constexpr std::uint64_t kOpening = 64 << 10;          // bytes copied while a file is opened
constexpr std::uint64_t kStagingBlock = StagingArea::kChunk;
constexpr int kMaxVectors = 64;  // parts of one preadv2(2)

GatedWrite gated_write(const Piece& piece, const Extent& extent) {
  const WriteKind kind = piece.route == Route::Buffered ? WriteKind::Cached : WriteKind::Direct;
  return {kind, extent.file->file().inode(), piece.offset, piece.bytes};
}

void release_file(SharedFile& file, Job& job) noexcept {
  job.note_closed(file, file.release());
}

}  // namespace

void copy_staged(const Flight& flight, std::byte* block, std::uint64_t bytes) {
  const Extent& extent = flight.in();
  if (extent.spans) {
    extent.spans->copy(flight.job().op(), block, flight.position, bytes);
  } else if (flight.job().op() == Op::Write) {
    copy_bytes(block, extent.memory + flight.position, bytes);
  } else {
    copy_bytes(extent.memory + flight.position, block, bytes);
  }
}

void Planner::reserve() {
  if (!flights_.empty()) return;
  for (std::vector<unsigned>* slots : {&free_flights_, &remainders_, &ready_}) slots->reserve(depth_);
  flights_.resize(depth_);
  for (unsigned i = depth_; i > 0; --i) free_flights_.push_back(i - 1);
}

Planner::Shares Planner::ready(Share share) {
  const std::size_t first = share.first;
  const std::uint64_t skip = share.skip;
  Shares shares;
  shares.push_back({std::move(share), first, skip, Clock::now()});
  shares.front().self = shares.begin();
  return shares;
}

bool Planner::plan() {
  copied_ = 0;
  while (!remainders_.empty() || !free_flights_.empty()) {
    const Planned planned = plan_next();
    if (planned == Planned::Nothing || planned == Planned::Stalled) return false;
    if (copied_ >= kCopyBurst) return true;
  }
  return false;
}

// Plans remainders first, then as the schedule says.
Planner::Planned Planner::plan_next() {
  while (!remainders_.empty()) {
    const Planned planned = plan_remainder();
    if (planned == Planned::Gated) break;  // does not hold up anything else
    if (planned != Planned::Nothing) return planned;
  }
  if (free_flights_.empty()) return Planned::Stalled;
  schedule_.begin();
  while (ActiveShare* const active = schedule_.next()) {
    const Planned planned = plan_share(*active);
    if (planned == Planned::Stalled) return planned;
    if (planned == Planned::Nothing) {
      end_planning(*active);
    } else if (planned == Planned::Gated) {
      schedule_.pass_over(*active);
    } else {
      if (!std::exchange(active->begun, true)) {
        counters_->queued_nanoseconds.add(Clock::now() - active->arrived);
      }
      schedule_.planned(*active);
      at_gate_ = false;
      return planned;
    }
  }
  if (schedule_.empty() && remainders_.empty()) return Planned::Nothing;
  at_gate_ = idle();  // others hold the gate: no completion here will announce it
  return Planned::Stalled;
}

Planner::Planned Planner::plan_remainder() {
  const unsigned slot = remainders_.back();
  Flight& flight = flights_[slot];
  std::uint64_t advanced = 0;
  const Planned planned = flight.job().stopped() ? Planned::Nothing : plan_piece(slot, &advanced);
  if (planned == Planned::Copied) {
    flight.position += advanced;
    flight.bytes -= advanced;
  }
  if (planned == Planned::Piece || planned == Planned::Nothing || flight.bytes == 0) remainders_.pop_back();
  if (planned == Planned::Nothing || flight.bytes == 0) release(slot);
  if (planned == Planned::Gated) at_gate_ = idle();
  return planned;
}

Planner::Planned Planner::plan_share(ActiveShare& active) {
  const Share& share = active.share;
  const std::vector<Extent>& extents = share.job->extents();
  while (!share.job->stopped() && !extents.empty()) {
    if (!active.entered) {
      const Planned entered = enter_extent(active);
      if (entered != Planned::Piece) return entered;
    }
    const std::uint64_t end = active.extent == share.last ? share.stop : extents[active.extent].bytes;
    const std::uint64_t most = share.job->tool().queue_depth;
    if (active.position < end && most != 0 && active.in_flight >= most) return Planned::Gated;
    if (active.position < end) {
      const unsigned slot = free_flights_.back();
      flights_[slot] = {&active, active.extent, active.position, end - active.position};
      std::uint64_t advanced = 0;
      const Planned planned = plan_piece(slot, &advanced);
      active.position += advanced;
      if (planned == Planned::Piece) {
        flights_[slot].bytes = advanced;
        free_flights_.pop_back();
        share.job->extents()[active.extent].file->hold();  // already held by this share: opens nothing
        ++active.in_flight;
      }
      return planned;
    }
    if (active.extent == share.last) break;
    ++active.extent;
    active.position = 0;
    active.residency = {};
    active.entered = false;
  }
  return Planned::Nothing;
}

// Holds and prepares the share's present file. Planned::Piece: its pieces may be planned.
Planner::Planned Planner::enter_extent(ActiveShare& active) {
  Job& job = *active.share.job;
  SharedFile* const file = job.extents()[active.extent].file.get();
  try {
    if (active.held != file) {
      if (active.held != nullptr) release_file(*std::exchange(active.held, nullptr), job);
      file->hold();
      active.held = file;
      copied_ += kOpening;
    }
    job.prepare(active.extent);
  } catch (...) {
    return denied(active, current_failure());
  }
  active.entered = true;
  active.denied = 0;
  active.in_a_row = in_a_row(job, job.extents()[active.extent]);
  if (help_ && !active.begun && !active.share.claims) divide(active);
  return Planned::Piece;
}

// Gives half of a large read to another lane if the page cache has it: copying is the processor's work. Not where the
// caller set the number of lanes, or it was divided already: so the share is the whole job.
void Planner::divide(ActiveShare& active) noexcept {
  const std::shared_ptr<Job>& job = active.share.job;
  const Extent& extent = job->extents()[active.extent];
  if (job->op() != Op::Read || job->tool().lanes != 0 || job->bytes() < kDividedBytes || extent.device) return;
  File& file = extent.file->file();
  if (file.cache() != Cache::Auto || !file.direct_possible()) return;
  if (!file.resident(active.residency, extent.offset, extent.bytes, extent.offset + extent.bytes)) {
    active.residency = {};  // a part of it may be there
    return;
  }
  try {
    const std::vector<Share> halves = split(job, 2);
    if (halves.size() < 2) return;
    Shares other = ready(halves[1]);
    job->expect_shares(2);
    active.share.last = halves[0].last;
    active.share.stop = halves[0].stop;
    active.share.claim_files();
    other.front().share.claim_files();
    if (!help_(other)) schedule_.add(std::move(other));
  } catch (const std::bad_alloc&) {  // goes on alone
  }
}

// Returns whether a lone small read continues others of its file: the page cache is faster then, as it reads ahead.
bool Planner::in_a_row(const Job& job, const Extent& extent) {
  if (job.op() != Op::Read || job.extents().size() != 1 || extent.bytes > kInPlaceBytes) return false;
  if (extent.device || extent.spans || !idle()) return false;
  File& file = extent.file->file();
  Row& row = rows_[file.inode() % rows_.size()];
  const bool next = row.inode == file.inode() && row.end == extent.offset;
  row = {file.inode(), extent.offset + extent.bytes, next ? row.reads + 1 : 1};
  if (row.reads < kReadsInARow || file.cache() != Cache::Auto) return false;
  try {
    file.buffered();
    return true;
  } catch (const IoError&) {  // no second descriptor: a direct read will do
    return false;
  }
}

// Handles a lack of descriptors: waits if transfers in flight will free some, otherwise only for a while.
Planner::Planned Planner::denied(ActiveShare& active, Failure failure) {
  if (failure.error == EMFILE || failure.error == ENFILE) {
    if (!idle()) return Planned::Stalled;
    pause_ = true;
    if (++active.denied <= kDescriptorPatience) return Planned::Stalled;
  }
  active.share.job->fail(std::move(failure));
  return Planned::Nothing;
}

// Plans the start of what the flight wants; sets `advanced` to the bytes planned or copied. Nothing: the job failed.
Planner::Planned Planner::plan_piece(unsigned slot, std::uint64_t* advanced) {
  Flight& flight = flights_[slot];
  ActiveShare& active = *flight.share;
  Job& job = *active.share.job;
  const Tool& tool = job.tool();
  const Extent& extent = job.extents()[flight.extent];
  File& file = extent.file->file();
  const bool scattered = extent.spans != nullptr;
  std::byte* const memory = scattered ? nullptr : extent.memory + flight.position;
  const std::uint64_t offset = extent.offset + flight.position;
  const Layout layout{file.direct_possible() && !active.in_a_row,
                      file.memory_alignment(),
                      file.offset_alignment(),
                      file.edge(),
                      !scattered && (tool.in_place || extent.fast_memory || extent.bytes <= kInPlaceBytes),
                      extent.device,
                      extent.file->padded()};
  const std::uint64_t wanted = tool.block_size != 0 ? tool.block_size : block_size_;
  const std::uint64_t block_size = scattered ? std::min(wanted, kStagingBlock) : wanted;
  const Piece piece = next_piece(job.op(), layout, reinterpret_cast<std::uintptr_t>(memory), offset, flight.bytes,
                                 block_size, kStagingBlock);
  if (!job.populated(flight.extent, flight.position, piece.bytes)) return Planned::Gated;
  if (piece.route != Route::Buffered && !extent.device && job.op() == Op::Read && file.cache() == Cache::Auto) {
    *advanced = read_cached(active, extent, flight.position, piece.bytes);
    active.moved += *advanced;
    copied_ += *advanced;
    counters_->read_bytes.add(*advanced);
    counters_->cached_bytes.add(*advanced);
    job.note_cached(*advanced);
    if (*advanced > 0) return Planned::Copied;
  }
  flight.piece = piece;
  flight.request = {job.op(), file.direct(),       memory,        piece.length, offset - piece.lead, -1,
                    slot,     file.registration(), job.priority()};
  try {
    if (piece.route == Route::Buffered) flight.request.fd = file.buffered();
    if (!pass_gates(flight)) return Planned::Gated;
    if ((scattered || piece.route == Route::Staged) && !stage(flight)) {
      give_back(flight);
      return Planned::Stalled;
    }
  } catch (...) {
    give_back(flight);
    return denied(active, current_failure());
  }
  ready_.push_back(slot);
  *advanced = piece.bytes;
  return Planned::Piece;
}

// Reads from the page cache, without waiting; returns the bytes read, 0 if not all are there.
std::uint64_t Planner::read_cached(ActiveShare& active, const Extent& extent, std::uint64_t position,
                                   std::uint64_t bytes) {
  File& file = extent.file->file();
  const std::uint64_t offset = extent.offset + position, end = extent.offset + extent.bytes;
  if (!file.resident(active.residency, offset, bytes, end)) return 0;
  std::array<iovec, kMaxVectors> vectors;
  int count = 0;
  std::uint64_t wanted = 0;
  while (wanted < bytes && count < kMaxVectors) {
    const Span part =
        extent.spans ? extent.spans->at(position + wanted, bytes - wanted) : Span{extent.memory + position, bytes};
    vectors[static_cast<std::size_t>(count++)] = {part.memory, part.bytes};
    wanted += part.bytes;
  }
  const std::uint64_t got = file.read_cached(vectors.data(), count, offset);
  if (got < wanted) active.residency.forget();
  return got;
}

// Returns false if all staging memory is in use.
bool Planner::stage(Flight& flight) {
  flight.block = staging_.allocate(flight.piece.length);
  if (!flight.block) return false;
  flight.request.data = flight.block.data;
  const Job& job = *flight.share->share.job;
  if (job.op() == Op::Write) {
    copy_staged(flight, flight.block.data, flight.piece.bytes);
    std::memset(flight.block.data + flight.piece.bytes, 0, flight.piece.length - flight.piece.bytes);
    copied_ += flight.piece.bytes;
  }
  return true;
}

bool Planner::pass_gates(Flight& flight) {
  flight.admitted = admission_->admit(flight.request.priority, flight.request.bytes);
  if (!flight.admitted || flight.request.op == Op::Read) return flight.admitted;
  flight.gated = enter_folios(gated_write(flight.piece, flight.in()));
  if (!flight.gated) give_back(flight);
  return flight.gated;
}

void Planner::give_back(Flight& flight) {
  if (std::exchange(flight.admitted, false)) admission_->finish(flight.request.priority, flight.request.bytes);
  if (std::exchange(flight.gated, false)) leave_folios(gated_write(flight.piece, flight.in()));
  if (flight.block) staging_.release(std::exchange(flight.block, {}));
}

void Planner::end(unsigned slot, std::uint64_t got) {
  Flight& flight = flights_[slot];
  flight.position += got;
  flight.bytes -= got;
  if (flight.bytes == 0 || flight.job().stopped()) return release(slot);
  give_back(flight);
  remainders_.push_back(slot);
}

void Planner::drop_stopped() {
  const auto kept = std::stable_partition(ready_.begin(), ready_.end(),
                                          [this](unsigned slot) { return !flights_[slot].job().stopped(); });
  for (auto slot = kept; slot != ready_.end(); ++slot) release(*slot);
  ready_.erase(kept, ready_.end());
}

void Planner::fail_all(const Failure& failure) {
  schedule_.begin();
  while (ActiveShare* const active = schedule_.next()) {
    active->share.job->fail(failure);
    end_planning(*active);
  }
  for (const unsigned slot : remainders_) {
    flights_[slot].job().fail(failure);
    release(slot);
  }
  remainders_.clear();
  finish_shares();
}

void Planner::release(unsigned slot) {
  Flight& flight = flights_[slot];
  give_back(flight);
  free_flights_.push_back(slot);
  ActiveShare& active = *flight.share;
  release_file(*active.share.job->extents()[flight.extent].file, *active.share.job);
  --active.in_flight;
  if (active.planned && active.in_flight == 0) ended_.splice(ended_.end(), draining_, active.self);
}

void Planner::end_planning(ActiveShare& active) {
  active.planned = true;
  if (active.held != nullptr) release_file(*std::exchange(active.held, nullptr), *active.share.job);
  schedule_.release(active, active.in_flight > 0 ? draining_ : ended_);
}

void Planner::finish_shares() {
  while (!ended_.empty()) {
    const std::shared_ptr<Job> job = ended_.front().share.job;
    const std::uint64_t moved = ended_.front().moved;
    ended_.front().share.release_files();
    ended_.pop_front();
    job->end_share(moved);
  }
}

}  // namespace nvme_ops
