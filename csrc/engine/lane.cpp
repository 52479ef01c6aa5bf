#include "engine/lane.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/limits.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kMaxReaped = 16;
constexpr std::uint64_t kReapBurst = 4 * kBlockSize;  // bytes that completions of one burst may have copied
constexpr std::chrono::microseconds kGatePause(50);   // before trying again a gate that others hold
constexpr std::chrono::milliseconds kPause(1);        // before trying again a kernel short of resources

// Nothing here cancels requests of io_uring, but in a storm of signals the kernel does.
bool may_be_repeated(std::int64_t result) {
  return result == -EAGAIN || result == -EINTR || result == -ECANCELED;
}

unsigned depth_of(const LaneOptions& options) {
  return static_cast<unsigned>(std::min(options.queue_depth, kMaxQueueDepth));
}

}  // namespace

Lane::Lane(LaneOptions options, Planner::Help help)
    : options_(std::move(options)),
      reap_at_once_(std::clamp<std::size_t>(kReapBurst / options_.block_size, 1, kMaxReaped)),
      planner_(options_.block_size, depth_of(options_), options_.staging, options_.admission, &counters_,
               std::move(help)),
      chunks_(StagingArea::kMostChunks) {}

bool Lane::step(std::chrono::milliseconds timeout, bool blocking) noexcept {
  if (!queue_ && !open_queue()) return true;
  const bool more = planner_.plan();
  if (planner_.take_at_gate()) std::this_thread::sleep_for(kGatePause);
  if (planner_.take_pause()) {
    std::this_thread::sleep_for(kPause);
    planner_.drop_stopped();
  }
  if (!(blocking && serve_alone())) submit();
  planner_.finish_shares();
  if (in_kernel_ == 0) {
    if (planner_.ready().empty()) return true;
    planner_.pause();  // the queue takes nothing now
    return false;
  }
  const std::size_t batch = options_.overlap_events || planner_.all_planned() ? 1 : std::max(1U, in_kernel_ / 8);
  std::array<Completion, kMaxReaped> completions;
  const std::size_t count =
      queue_->reap(completions.data(), reap_at_once_, more ? 0 : std::min(batch, reap_at_once_), timeout);
  const auto now = Clock::now();
  for (std::size_t i = 0; i < count; ++i) complete(completions[i], now);
  if (queue_->broken() && in_kernel_ == 0 && planner_.ready().empty()) {
    rest();
    queue_.reset();
  }
  planner_.finish_shares();
  return count > 0 || more;
}

// Opens the queue; if there is none, fails every share and returns false.
bool Lane::open_queue() {
  const QueueOptions wanted{depth_of(options_), static_cast<unsigned>(StagingArea::kMostChunks),
                            options_.single_submit};
  for (const Backend* backend : options_.backends) {
    try {
      planner_.reserve();
      queue_ = backend->open(wanted);
      options_.in_use->store(backend);
      return true;
    } catch (...) {
      if (backend == options_.backends.back()) planner_.fail_all(current_failure());  // otherwise try the next one
    }
  }
  return false;
}

// Registers a huge page that is used a second time for large blocks: a lone request would not gain by it.
bool Lane::registered(const StagingBlock& block) {
  Chunk& chunk = chunks_[static_cast<std::size_t>(block.chunk)];
  if (!chunk.registered && may_register_ && block.bytes > kInPlaceBytes && std::exchange(chunk.used, true)) {
    chunk.registered = may_register_ =
        queue_->register_buffer(block.chunk, planner_.staging().chunk(block.chunk), StagingArea::kChunk);
  }
  return chunk.registered;
}

void Lane::submit() {
  std::vector<unsigned>& ready = planner_.ready();
  if (ready.empty()) return;
  std::array<Request, 64> batch;
  std::size_t taken_in_all = 0;
  while (taken_in_all < ready.size()) {
    const std::size_t count = std::min(batch.size(), ready.size() - taken_in_all);
    for (std::size_t i = 0; i < count; ++i) {
      Flight& flight = planner_.flight(ready[taken_in_all + i]);
      flight.request.buffer = flight.block && registered(flight.block) ? flight.block.chunk : -1;
      batch[i] = flight.request;
    }
    const std::size_t taken = queue_->submit(batch.data(), count);
    taken_in_all += taken;
    if (taken < count) break;  // the rest is offered again after the next completions
  }
  const auto now = Clock::now();
  for (std::size_t i = 0; i < taken_in_all; ++i) note_submitted(planner_.flight(ready[i]), now);
  ready.erase(ready.begin(), ready.begin() + static_cast<std::ptrdiff_t>(taken_in_all));
}

void Lane::note_submitted(Flight& flight, Clock::time_point now) {
  flight.submitted = now;
  counters_.in_flight_sum.add(++in_kernel_);
  counters_.in_flight_max.raise_to(in_kernel_);
}

// Serves a lone small request by a plain system call: waking up for its completion would take longer.
bool Lane::serve_alone() {
  std::vector<unsigned>& ready = planner_.ready();
  if (ready.size() != 1 || in_kernel_ != 0 || !planner_.all_planned() || !queue_->may_be_bypassed()) return false;
  Flight& flight = planner_.flight(ready.front());
  if (flight.request.bytes > kInPlaceBytes) return false;
  ready.clear();
  note_submitted(flight, Clock::now());
  const std::int64_t result = transfer(flight.request);
  complete({flight.request.token, result}, Clock::now());
  return true;
}

void Lane::complete(const Completion& completion, Clock::time_point now) {
  --in_kernel_;
  Flight& flight = planner_.flight(completion.token);
  counters_.requests.add(1);
  counters_.kernel_nanoseconds.add(now - flight.submitted);
  // A staged read that ended before the wanted bytes says nothing about them: retry, but not forever.
  const bool fell_short = completion.result > 0 && static_cast<std::uint64_t>(completion.result) <= flight.piece.lead;
  const bool again = may_be_repeated(completion.result) || fell_short;
  if (again && ++flight.retries <= (fell_short ? kPatience : kMaxRetries)) {
    if (flight.retries > kPatience) planner_.pause();
    planner_.ready().push_back(static_cast<unsigned>(completion.token));
    return;
  }
  std::uint64_t got = 0;
  try {
    got = judge(flight, completion.result);
  } catch (...) {  // no memory left to describe the failure
    flight.job().fail(current_failure());
  }
  planner_.end(static_cast<unsigned>(completion.token), got);
}

// The one place that judges completions. Returns how many of the wanted bytes it moved.
std::uint64_t Lane::judge(Flight& flight, std::int64_t result) {
  Job& job = flight.job();
  const Extent& extent = flight.in();
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
    copy_staged(flight, flight.block.data + piece.lead, got);
  }
  flight.share->moved += got;
  (job.op() == Op::Read ? counters_.read_bytes : counters_.written_bytes).add(got);
  if (flight.block) counters_.staged_bytes.add(got);
  if (piece.route == Route::Buffered) counters_.cached_bytes.add(got);
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

void Lane::rest() noexcept {
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (std::exchange(chunks_[i], {}).registered) queue_->unregister_buffer(static_cast<int>(i));
  }
  planner_.staging().trim();
}

}  // namespace nvme_ops
