#include "engine/lane.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/limits.h"
#include "engine/copy.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kReapAtOnce = 16;               // then feed the queue again
constexpr std::uint64_t kCopyBurst = 2 * kBlockSize;  // memory copied before the queue is fed again

}  // namespace

Lane::Lane(LaneOptions options)
    : options_(std::move(options)),
      depth_(static_cast<unsigned>(std::min(options_.queue_depth, kMaxQueueDepth))),
      staging_(options_.staging),
      registered_(StagingArea::kMostChunks),
      flights_(depth_) {
  for (unsigned i = depth_; i > 0; --i) free_flights_.push_back(i - 1);
}

Lane::~Lane() = default;

void Lane::add(Share share) {
  active_.push_back({share, share.first, share.skip});
}

bool Lane::step(std::chrono::milliseconds timeout) {
  bool more = false;
  try {
    if (!queue_) open_queue();
    more = plan();
    submit();
  } catch (const IoError& error) {
    drop_unsubmitted(error.failure());
  }
  finish_shares();
  if (in_kernel_ == 0) return ready_.empty();

  const bool idle = !more && ready_.empty();
  const std::size_t batch = options_.overlap_events || active_.back().planned ? 1 : std::max(1U, in_kernel_ / 8);
  std::array<Completion, kReapAtOnce> completions;
  std::size_t count = 0;
  try {
    count = queue_->reap(completions.data(), completions.size(), more ? 0 : std::min(batch, kReapAtOnce), timeout);
  } catch (const IoError& error) {
    fail_everything(error.failure());
    return true;
  }
  for (std::size_t i = 0; i < count; ++i) complete(completions[i]);
  finish_shares();
  return count > 0 || !idle;
}

void Lane::open_queue() {
  const QueueOptions wanted{depth_, static_cast<unsigned>(StagingArea::kMostChunks), options_.single_submit};
  for (const Backend* backend : options_.backends) {
    try {
      queue_ = backend->open(wanted);
      return;
    } catch (const IoError&) {
      if (backend == options_.backends.back()) throw;  // nothing left to fall back to
    }
  }
}

bool Lane::plan() {
  copied_ = 0;
  while (!free_flights_.empty()) {
    switch (plan_next()) {
      case Planned::Nothing:
      case Planned::Stalled:
        return false;
      case Planned::Piece:
      case Planned::Copied:
        if (copied_ >= kCopyBurst) return true;
    }
  }
  return false;
}

Lane::Planned Lane::plan_next() {
  std::uint64_t advanced = 0;
  while (!rests_.empty()) {
    Rest& rest = rests_.front();
    const Planned planned = rest.share->share.job->stopped()
                                ? Planned::Nothing
                                : plan_piece(*rest.share, rest.extent, rest.position, rest.bytes, &advanced);
    if (planned == Planned::Stalled) return planned;
    rest.position += advanced;
    rest.bytes -= advanced;
    if (planned == Planned::Nothing || rest.bytes == 0) {
      --rest.share->in_flight;
      rests_.pop_front();
    }
    if (planned != Planned::Nothing) return planned;
  }
  for (ActiveShare& active : active_) {
    while (!active.planned) {
      const Share& share = active.share;
      const std::vector<Extent>& extents = share.job->extents();
      const std::uint64_t end = active.extent == share.last ? share.stop : extents[active.extent].bytes;
      if (active.position >= end) {
        active.planned = active.extent == share.last;
        ++active.extent;
        active.position = 0;
        continue;
      }
      if (share.job->stopped()) {
        active.planned = true;
        break;
      }
      const Planned planned = plan_piece(active, active.extent, active.position, end - active.position, &advanced);
      active.position += advanced;
      if (planned != Planned::Nothing) return planned;
    }
  }
  return Planned::Nothing;
}

// Advances by what was planned or copied. Nothing: the job failed here.
Lane::Planned Lane::plan_piece(ActiveShare& active, std::size_t index, std::uint64_t position, std::uint64_t bytes,
                               std::uint64_t* advanced) {
  *advanced = 0;
  Job& job = *active.share.job;
  const Extent& extent = job.extents()[index];
  File& file = *extent.file;
  std::byte* const memory = extent.memory + position;
  const std::uint64_t offset = extent.offset + position;
  const Layout layout{file.direct_possible(), file.memory_alignment(), file.offset_alignment(), file.edge(),
                      extent.fast_memory || extent.bytes <= kInPlaceBytes};
  const Piece piece = next_piece(job.op(), layout, reinterpret_cast<std::uintptr_t>(memory), offset, bytes,
                                 options_.block_size, StagingArea::kChunk);
  Request request{job.op(), file.direct(), memory, piece.length, offset - piece.lead, -1, 0};
  StagingBlock block;
  try {
    if (piece.route == Route::Buffered) {
      request.fd = file.buffered();
    } else if (job.op() == Op::Read && file.cache() == Cache::Auto &&
               in_page_cache(file.direct(), offset, piece.bytes)) {
      *advanced = read_from_cache(file, memory, offset, piece.bytes);
      active.moved += *advanced;
      copied_ += *advanced;
      if (*advanced > 0) return Planned::Copied;
    }
    if (piece.route == Route::Staged) {
      block = staging_.allocate(piece.length);
      if (!block) return Planned::Stalled;
      request.data = block.data;
      if (registered(block)) request.buffer = block.chunk;
      if (job.op() == Op::Write) {
        copy_bytes(block.data, memory, piece.bytes);
        copied_ += piece.bytes;
      }
    }
  } catch (const IoError& error) {
    job.fail(error.failure());
    return Planned::Nothing;
  }
  const unsigned slot = free_flights_.back();
  free_flights_.pop_back();
  request.token = slot;
  flights_[slot] = {&active, index, position, piece, block, request, 0};
  ready_.push_back(slot);
  ++active.in_flight;
  *advanced = piece.bytes;
  return Planned::Piece;
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

// Takes what is there without waiting; what was evicted meanwhile is left for a direct read.
std::uint64_t Lane::read_from_cache(File& file, std::byte* memory, std::uint64_t offset, std::uint64_t bytes) {
  const iovec vector{memory, bytes};
  const ssize_t got = ::preadv2(file.buffered(), &vector, 1, static_cast<off_t>(offset), RWF_NOWAIT);
  return got > 0 ? static_cast<std::uint64_t>(got) : 0;
}

void Lane::submit() {
  std::array<Request, 64> batch;
  std::size_t taken_in_all = 0;
  while (taken_in_all < ready_.size()) {
    const std::size_t count = std::min(batch.size(), ready_.size() - taken_in_all);
    for (std::size_t i = 0; i < count; ++i) batch[i] = flights_[ready_[taken_in_all + i]].request;
    std::size_t taken = 0;
    try {
      taken = queue_->submit(batch.data(), count);
    } catch (...) {
      ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken_in_all));
      throw;
    }
    in_kernel_ += static_cast<unsigned>(taken);
    taken_in_all += taken;
    if (taken < count) break;  // offered again after the next completions
  }
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken_in_all));
}

void Lane::complete(const Completion& completion) {
  --in_kernel_;
  NVME_INVARIANT(completion.token < flights_.size());
  Flight& flight = flights_[completion.token];
  const bool again = completion.result == -EAGAIN || completion.result == -EINTR;
  if (again && ++flight.retries <= kMaxRetries) {
    ready_.push_back(static_cast<unsigned>(completion.token));
    return;
  }
  judge(flight, completion.result);
  release(flight);
}

// The one place that decides what a completion means.
void Lane::judge(Flight& flight, std::int64_t result) {
  Job& job = *flight.share->share.job;
  const Extent& extent = job.extents()[flight.extent];
  const Piece& piece = flight.piece;
  std::uint64_t got = 0;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool refused = (error == EINVAL || error == EOPNOTSUPP) && piece.route != Route::Buffered;
    if (!refused) {
      job.fail(transfer_failure(error, job.op(), piece.bytes, piece.offset, extent.file->path()));
      return;
    }
    extent.file->refuse_direct();
  } else {
    const auto moved = static_cast<std::uint64_t>(result);
    got = std::min(piece.bytes, moved - std::min(moved, piece.lead));
    if (piece.route == Route::Staged && job.op() == Op::Read) {
      copy_bytes(extent.memory + flight.position, flight.block.data + piece.lead, got);
    }
    flight.share->moved += got;
    if (got == 0 && job.op() == Op::Read) {
      struct stat now{};
      ::fstat(flight.request.fd, &now);
      job.fail(end_of_file(piece.bytes, piece.offset, static_cast<std::uint64_t>(now.st_size), extent.file->path()));
      return;
    }
    if (got == 0) {
      job.fail(transfer_failure(EIO, job.op(), piece.bytes, piece.offset, extent.file->path()));
      return;
    }
  }
  if (got < piece.bytes) {
    ++flight.share->in_flight;
    rests_.push_back({flight.share, flight.extent, flight.position + got, piece.bytes - got});
  }
}

void Lane::release(Flight& flight) {
  if (flight.block) staging_.release(flight.block);
  --flight.share->in_flight;
  free_flights_.push_back(static_cast<unsigned>(&flight - flights_.data()));
}

// The queue took nothing of these and will not: they fail, what is in flight goes on.
void Lane::drop_unsubmitted(const Failure& failure) {
  for (ActiveShare& active : active_) {
    active.share.job->fail(failure);
    active.planned = true;
  }
  for (const Rest& rest : rests_) --rest.share->in_flight;
  rests_.clear();
  for (const unsigned slot : ready_) release(flights_[slot]);
  ready_.clear();
}

// The queue itself is gone (its descriptor was closed under us): nobody will tell when its memory is free again.
void Lane::fail_everything(const Failure& failure) {
  for (const ActiveShare& active : active_) active.share.job->fail(failure);
  for (ActiveShare& active : active_) {
    active.in_flight = 0;
    active.planned = true;
  }
  rests_.clear();
  ready_.clear();
  free_flights_.clear();
  for (unsigned i = depth_; i > 0; --i) free_flights_.push_back(i - 1);
  in_kernel_ = 0;
  staging_.forget();
  registered_.assign(registered_.size(), false);
  queue_.reset();
  finish_shares();
}

void Lane::finish_shares() {
  for (auto active = active_.begin(); active != active_.end();) {
    if (active->planned && active->in_flight == 0) {
      const std::shared_ptr<Job> job = std::move(active->share.job);
      const std::uint64_t moved = active->moved;
      active = active_.erase(active);
      job->end_share(moved);
    } else {
      ++active;
    }
  }
}

void Lane::rest() {
  NVME_INVARIANT(in_kernel_ == 0);
  for (std::size_t chunk = 0; chunk < registered_.size(); ++chunk) {
    if (registered_[chunk]) queue_->unregister_buffer(static_cast<int>(chunk));
    registered_[chunk] = false;
  }
  staging_.trim();
}

void Lane::abandon() noexcept {
  if (queue_) queue_->abandon();
}

}  // namespace nvme_ops
