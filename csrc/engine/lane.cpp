#include "engine/lane.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/limits.h"
#include "base/transfer.h"
#include "engine/copy.h"
#include "engine/folio_gate.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kMaxReaped = 16;
constexpr std::uint64_t kReapBurst = 4 * kBlockSize;  // memory that completions may ask to be copied
constexpr unsigned kTurn = 16;                        // pieces of one share planned before the next one's turn
constexpr std::size_t kMaxGated = 16;                 // shares passed over because others are at the gate
constexpr std::uint64_t kCopyBurst = 2 * kBlockSize;  // memory copied before the queue is fed again
constexpr std::uint64_t kOpening = 64 << 10;          // memory that is copied while a file is opened
constexpr std::uint64_t kStagingBlock = StagingArea::kChunk;
constexpr int kMaxVectors = 64;                      // parts of a scattered read in one system call
constexpr std::chrono::microseconds kGatePause(50);  // before asking again for what others will give way to
constexpr std::chrono::milliseconds kPause(1);       // before asking again a kernel that had no room

// Between a staging block and the caller's memory.
void copy(const Job& job, std::size_t index, std::uint64_t position, std::byte* block, std::uint64_t bytes) {
  const Extent& extent = job.extents()[index];
  if (extent.spans) {
    extent.spans->copy(job.op(), block, position, bytes);
  } else if (job.op() == Op::Write) {
    copy_bytes(block, extent.memory + position, bytes);
  } else {
    copy_bytes(extent.memory + position, block, bytes);
  }
}

GatedWrite gated_write(const Piece& piece, const Extent& extent) {
  const WriteKind kind = piece.route == Route::Buffered ? WriteKind::Cached : WriteKind::Direct;
  return {kind, extent.file->file().inode(), piece.offset, piece.bytes};
}

void release_file(SharedFile& file, Job& job) noexcept {
  job.note_closed(file, file.release());
}

}  // namespace

Lane::Lane(LaneOptions options)
    : options_(std::move(options)),
      depth_(static_cast<unsigned>(std::min(options_.queue_depth, kMaxQueueDepth))),
      reap_at_once_(std::clamp<std::size_t>(kReapBurst / options_.block_size, 1, kMaxReaped)),
      staging_(options_.staging),
      registered_(StagingArea::kMostChunks) {}

Lane::Shares Lane::ready(Share share) {
  const std::size_t first = share.first;
  const std::uint64_t skip = share.skip;
  Shares shares;
  shares.push_back({std::move(share), first, skip});
  shares.front().self = shares.begin();
  return shares;
}

void Lane::add(Shares shares) noexcept {
  planning_.splice(planning_.end(), shares);
}

bool Lane::step(std::chrono::milliseconds timeout, bool blocking) noexcept {
  if (!queue_ && !open_queue()) return true;
  const bool more = plan();
  if (std::exchange(at_gate_, false)) std::this_thread::sleep_for(kGatePause);
  if (std::exchange(pause_, false)) {
    std::this_thread::sleep_for(kPause);
    drop_stopped();
  }
  if (!(blocking && serve_alone())) submit();
  finish_shares();
  if (in_kernel_ == 0) {
    if (ready_.empty()) return true;
    pause_ = true;  // the queue takes nothing at the moment
    return false;
  }
  const std::size_t batch = options_.overlap_events || planning_.empty() ? 1 : std::max(1U, in_kernel_ / 8);
  std::array<Completion, kMaxReaped> completions;
  const std::size_t count =
      queue_->reap(completions.data(), reap_at_once_, more ? 0 : std::min(batch, reap_at_once_), timeout);
  for (std::size_t i = 0; i < count; ++i) complete(completions[i]);
  if (queue_->broken() && in_kernel_ == 0 && ready_.empty()) {
    rest();
    queue_.reset();
  }
  finish_shares();
  return count > 0 || more;
}

// Without a queue every share fails, and false comes back.
bool Lane::open_queue() {
  const QueueOptions wanted{depth_, static_cast<unsigned>(StagingArea::kMostChunks), options_.single_submit};
  for (const Backend* backend : options_.backends) {
    try {
      reserve();
      queue_ = backend->open(wanted);
      options_.in_use->store(backend);
      return true;
    } catch (...) {
      if (backend != options_.backends.back()) continue;  // another one may do
      for (const ActiveShare& active : planning_) active.share.job->fail(current_failure());
      while (!planning_.empty()) end_planning(planning_.front());
      for (const unsigned slot : remainders_) {
        flights_[slot].share->share.job->fail(current_failure());
        release(slot);
      }
      remainders_.clear();
      finish_shares();
    }
  }
  return false;
}

// Room for all that can be in flight, so that nothing on a transfer's way needs memory.
void Lane::reserve() {
  if (!flights_.empty()) return;
  for (std::vector<unsigned>* slots : {&free_flights_, &remainders_, &ready_}) slots->reserve(depth_);
  flights_.resize(depth_);
  for (unsigned i = depth_; i > 0; --i) free_flights_.push_back(i - 1);
}

bool Lane::plan() {
  copied_ = 0;
  while (!remainders_.empty() || !free_flights_.empty()) {
    const Planned planned = plan_next();
    if (planned == Planned::Nothing || planned == Planned::Stalled) return false;
    if (copied_ >= kCopyBurst) return true;
  }
  return false;
}

// Remainders first, then the shares in order, but no large one keeps a small one behind it waiting to its end, and one
// at the gate none.
Lane::Planned Lane::plan_next() {
  while (!remainders_.empty()) {
    const Planned planned = plan_remainder();
    if (planned != Planned::Nothing) return planned == Planned::Gated ? Planned::Stalled : planned;
  }
  if (free_flights_.empty()) return Planned::Stalled;
  for (std::size_t gated = 0; gated < std::min(planning_.size(), kMaxGated);) {
    ActiveShare& active = planning_.front();
    const Planned planned = plan_share(active);
    if (planned == Planned::Nothing) {
      end_planning(active);
      continue;
    }
    if (planned == Planned::Stalled) return planned;
    if (planned == Planned::Gated) ++gated;
    if (planned == Planned::Gated || ++active.turn == kTurn) {
      active.turn = 0;
      planning_.splice(planning_.end(), planning_, active.self);
    }
    if (planned != Planned::Gated) return planned;
  }
  if (planning_.empty()) return Planned::Nothing;
  at_gate_ = in_kernel_ == 0 && ready_.empty();  // others hold it: nothing here will end and tell
  return Planned::Stalled;
}

Lane::Planned Lane::plan_remainder() {
  const unsigned slot = remainders_.back();
  Flight& flight = flights_[slot];
  std::uint64_t advanced = 0;
  const Planned planned = flight.share->share.job->stopped() ? Planned::Nothing : plan_piece(slot, &advanced);
  if (planned == Planned::Copied) {
    flight.position += advanced;
    flight.bytes -= advanced;
  }
  if (planned == Planned::Piece || planned == Planned::Nothing || flight.bytes == 0) remainders_.pop_back();
  if (planned == Planned::Nothing || flight.bytes == 0) release(slot);
  if (planned == Planned::Gated) at_gate_ = in_kernel_ == 0 && ready_.empty();
  return planned;
}

Lane::Planned Lane::plan_share(ActiveShare& active) {
  const Share& share = active.share;
  const std::vector<Extent>& extents = share.job->extents();
  while (!share.job->stopped() && !extents.empty()) {
    if (!active.entered) {
      const Planned entered = enter_extent(active);
      if (entered != Planned::Piece) return entered;
    }
    const std::uint64_t end = active.extent == share.last ? share.stop : extents[active.extent].bytes;
    if (active.position < end) {
      const unsigned slot = free_flights_.back();
      flights_[slot] = {&active, active.extent, active.position, end - active.position, {}, {}, {}, 0, false};
      std::uint64_t advanced = 0;
      const Planned planned = plan_piece(slot, &advanced);
      active.position += advanced;
      if (planned == Planned::Piece) {
        flights_[slot].bytes = advanced;
        free_flights_.pop_back();
        share.job->extents()[active.extent].file->hold();  // held by this share already: opens nothing
        ++active.in_flight;
      }
      return planned;
    }
    if (active.extent == share.last) break;
    ++active.extent;
    active.position = 0;
    active.entered = false;
  }
  return Planned::Nothing;
}

// Piece: its pieces may be planned.
Lane::Planned Lane::enter_extent(ActiveShare& active) {
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
  return Planned::Piece;
}

// Descriptors that transfers in flight will give back are waited for, others for a while.
Lane::Planned Lane::denied(ActiveShare& active, Failure failure) {
  if (failure.error == EMFILE || failure.error == ENFILE) {
    if (in_kernel_ > 0 || !ready_.empty()) return Planned::Stalled;
    pause_ = true;
    if (++active.denied <= kDescriptorPatience) return Planned::Stalled;
  }
  active.share.job->fail(std::move(failure));
  return Planned::Nothing;
}

// The piece at the start of what the flight wants; `advanced` by what was planned or copied. Nothing: the job has
// failed.
Lane::Planned Lane::plan_piece(unsigned slot, std::uint64_t* advanced) {
  Flight& flight = flights_[slot];
  ActiveShare& active = *flight.share;
  const Job& job = *active.share.job;
  const Extent& extent = job.extents()[flight.extent];
  File& file = extent.file->file();
  const bool scattered = extent.spans != nullptr;
  std::byte* const memory = scattered ? nullptr : extent.memory + flight.position;
  const std::uint64_t offset = extent.offset + flight.position;
  const Layout layout{file.direct_possible(),
                      file.memory_alignment(),
                      file.offset_alignment(),
                      file.edge(),
                      !scattered && (extent.fast_memory || extent.bytes <= kInPlaceBytes),
                      extent.device};
  const std::uint64_t block_size = scattered ? std::min(options_.block_size, kStagingBlock) : options_.block_size;
  const Piece piece = next_piece(job.op(), layout, reinterpret_cast<std::uintptr_t>(memory), offset, flight.bytes,
                                 block_size, kStagingBlock);
  if (!job.populated(flight.extent, flight.position, piece.bytes)) return Planned::Gated;
  if (piece.route != Route::Buffered && !extent.device && job.op() == Op::Read && file.cache() == Cache::Auto) {
    *advanced = read_cached(extent, flight.position, piece.bytes);
    active.moved += *advanced;
    copied_ += *advanced;
    if (*advanced > 0) return Planned::Copied;
  }
  flight.piece = piece;
  flight.request = {job.op(), file.direct(), memory, piece.length, offset - piece.lead, -1, slot, file.registration()};
  try {
    if (piece.route == Route::Buffered) flight.request.fd = file.buffered();
    if (!pass_gate(flight)) return Planned::Gated;
    if ((scattered || piece.route == Route::Staged) && !stage(flight)) {
      leave_gate(flight);
      return Planned::Stalled;
    }
  } catch (...) {
    leave_gate(flight);
    return denied(active, current_failure());
  }
  ready_.push_back(slot);
  *advanced = piece.bytes;
  return Planned::Piece;
}

// From the page cache, without waiting; bytes, 0 where they are not all there.
std::uint64_t Lane::read_cached(const Extent& extent, std::uint64_t position, std::uint64_t bytes) {
  std::array<iovec, kMaxVectors> vectors;
  int count = 0;
  std::uint64_t wanted = 0;
  while (wanted < bytes && count < kMaxVectors) {
    const Span part =
        extent.spans ? extent.spans->at(position + wanted, bytes - wanted) : Span{extent.memory + position, bytes};
    vectors[static_cast<std::size_t>(count++)] = {part.memory, part.bytes};
    wanted += part.bytes;
  }
  return extent.file->file().read_cached(vectors.data(), count, extent.offset + position, wanted);
}

// False when all staging memory is in use.
bool Lane::stage(Flight& flight) {
  flight.block = staging_.allocate(flight.piece.length);
  if (!flight.block) return false;
  flight.request.data = flight.block.data;
  if (registered(flight.block)) flight.request.buffer = flight.block.chunk;
  const Job& job = *flight.share->share.job;
  if (job.op() == Op::Write) {
    copy(job, flight.extent, flight.position, flight.block.data, flight.piece.bytes);
    copied_ += flight.piece.bytes;
  }
  return true;
}

bool Lane::pass_gate(Flight& flight) {
  if (flight.request.op == Op::Read) return true;
  flight.gated = enter_folios(gated_write(flight.piece, flight.share->share.job->extents()[flight.extent]));
  return flight.gated;
}

void Lane::leave_gate(Flight& flight) {
  if (!std::exchange(flight.gated, false)) return;
  leave_folios(gated_write(flight.piece, flight.share->share.job->extents()[flight.extent]));
}

// Registers a huge page with the queue when it is first used for blocks large enough to gain by it.
bool Lane::registered(const StagingBlock& block) {
  const auto chunk = static_cast<std::size_t>(block.chunk);
  if (!registered_[chunk] && may_register_ && block.bytes > kInPlaceBytes) {
    registered_[chunk] = may_register_ =
        queue_->register_buffer(block.chunk, staging_.chunk(block.chunk), StagingArea::kChunk);
  }
  return registered_[chunk];
}

void Lane::submit() {
  std::array<Request, 64> batch;
  std::size_t taken_in_all = 0;
  while (taken_in_all < ready_.size()) {
    const std::size_t count = std::min(batch.size(), ready_.size() - taken_in_all);
    for (std::size_t i = 0; i < count; ++i) batch[i] = flights_[ready_[taken_in_all + i]].request;
    const std::size_t taken = queue_->submit(batch.data(), count);
    taken_in_all += taken;
    if (taken < count) break;  // offered again after the next completions
  }
  in_kernel_ += static_cast<unsigned>(taken_in_all);
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken_in_all));
}

// Planned pieces of jobs that have failed or were interrupted need not wait for a queue that takes them.
void Lane::drop_stopped() {
  const auto stopped = [this](unsigned slot) { return flights_[slot].share->share.job->stopped(); };
  const auto kept = std::stable_partition(ready_.begin(), ready_.end(), [&](unsigned slot) { return !stopped(slot); });
  for (auto slot = kept; slot != ready_.end(); ++slot) release(*slot);
  ready_.erase(kept, ready_.end());
}

// A lone small request is a plain system call: waking up for its completion would take longer.
bool Lane::serve_alone() {
  if (ready_.size() != 1 || in_kernel_ != 0 || !planning_.empty() || !queue_->may_be_passed_by()) return false;
  const Request& request = flights_[ready_.front()].request;
  if (request.bytes > kInPlaceBytes) return false;
  ready_.clear();
  ++in_kernel_;
  complete({request.token, transfer(request)});
  return true;
}

void Lane::complete(const Completion& completion) {
  --in_kernel_;
  Flight& flight = flights_[completion.token];
  // A staged read that ended before the wanted bytes says nothing of them, unless it is tried for ever.
  const bool fell_short = completion.result > 0 && static_cast<std::uint64_t>(completion.result) <= flight.piece.lead;
  const bool again = completion.result == -EAGAIN || completion.result == -EINTR || fell_short;
  if (again && ++flight.retries <= (fell_short ? kPatience : kMaxRetries)) {
    pause_ |= flight.retries > kPatience;
    ready_.push_back(static_cast<unsigned>(completion.token));
    return;
  }
  std::uint64_t got = 0;
  try {
    got = judge(flight, completion.result);
  } catch (...) {  // no memory left to say what failed
    flight.share->share.job->fail(current_failure());
  }
  leave_gate(flight);
  if (flight.block) staging_.release(std::exchange(flight.block, {}));
  flight.position += got;
  flight.bytes -= got;
  const auto slot = static_cast<unsigned>(completion.token);
  if (flight.bytes > 0 && !flight.share->share.job->stopped()) {
    remainders_.push_back(slot);
  } else {
    release(slot);
  }
}

// The one place that decides what a completion means. Returns how many of the wanted bytes it moved.
std::uint64_t Lane::judge(Flight& flight, std::int64_t result) {
  Job& job = *flight.share->share.job;
  const Extent& extent = job.extents()[flight.extent];
  const Piece& piece = flight.piece;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool refused = (error == EINVAL || error == EOPNOTSUPP) && piece.route != Route::Buffered && !extent.device;
    if (!refused || queue_->broken()) {
      job.fail(transfer_failure(error, job.op(), piece.bytes, piece.offset, extent.file->file().path()));
    } else {
      extent.file->file().refuse_direct();
    }
    return 0;
  }
  const auto moved = static_cast<std::uint64_t>(result);
  const std::uint64_t got = std::min(piece.bytes, moved - std::min(moved, piece.lead));
  if (flight.block && job.op() == Op::Read) {
    copy(job, flight.extent, flight.position, flight.block.data + piece.lead, got);
  }
  flight.share->moved += got;
  if (got == 0 && job.op() == Op::Read) {
    struct stat now{};
    ::fstat(flight.request.fd, &now);
    job.fail(
        end_of_file(piece.bytes, piece.offset, static_cast<std::uint64_t>(now.st_size), extent.file->file().path()));
  } else if (got == 0) {
    job.fail(transfer_failure(EIO, job.op(), piece.bytes, piece.offset, extent.file->file().path()));
  }
  return got;
}

void Lane::release(unsigned slot) {
  Flight& flight = flights_[slot];
  leave_gate(flight);
  if (flight.block) staging_.release(std::exchange(flight.block, {}));
  free_flights_.push_back(slot);
  ActiveShare& active = *flight.share;
  release_file(*active.share.job->extents()[flight.extent].file, *active.share.job);
  --active.in_flight;
  if (active.planned && active.in_flight == 0) ended_.splice(ended_.end(), draining_, active.self);
}

void Lane::end_planning(ActiveShare& active) {
  active.planned = true;
  if (active.held != nullptr) release_file(*std::exchange(active.held, nullptr), *active.share.job);
  Shares& next = active.in_flight > 0 ? draining_ : ended_;
  next.splice(next.end(), planning_, active.self);
}

void Lane::finish_shares() {
  while (!ended_.empty()) {
    const std::shared_ptr<Job> job = ended_.front().share.job;
    const std::uint64_t moved = ended_.front().moved;
    ended_.front().share.release_files();
    ended_.pop_front();
    job->end_share(moved);
  }
}

void Lane::rest() noexcept {
  for (std::size_t chunk = 0; chunk < registered_.size(); ++chunk) {
    if (registered_[chunk]) queue_->unregister_buffer(static_cast<int>(chunk));
    registered_[chunk] = false;
  }
  staging_.trim();
}

}  // namespace nvme_ops
