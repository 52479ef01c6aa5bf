// How work is divided: from shares to requests, without a queue; shares of a job, pieces of a range, chunks of a
// device, questions about the page cache.
#include <sys/mman.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/limits.h"
#include "check.h"
#include "engine/device_chunks.h"
#include "engine/folio_gate.h"
#include "engine/lane.h"
#include "engine/residency.h"
#include "engine/split.h"
#include "engine/staging.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

constexpr std::uint64_t kBlock = 64 << 10;
constexpr unsigned kDepth = 4;

struct Planned {
  Counters counters;
  bool alone = false;      // no lane helps
  Planner::Shares helped;  // what was given to another lane
  Planner planner{kBlock,
                  kDepth,
                  std::make_shared<StagingBudget>(4),
                  std::make_shared<Admission>(),
                  &counters,
                  [this](Planner::Shares& shares) {
                    if (alone) return false;
                    helped.splice(helped.end(), shares);
                    return true;
                  }};

  Planned() { planner.reserve(); }

  std::shared_ptr<Job> add(Op op, std::vector<Extent> extents, Priority priority = Priority::Demand,
                           const Tool& tool = {}) {
    auto job = std::make_shared<Job>(op, std::move(extents), priority, tool);
    job->expect_shares(1);
    planner.add(Planner::ready(split(job, 1).front()));
    return job;
  }

  // Moves what is ready by plain system calls, each `part` of the way at most; the requests in order.
  std::vector<Request> move(std::uint64_t most = UINT64_MAX) {
    std::vector<Request> moved;
    std::vector<unsigned> ready;
    ready.swap(planner.ready());
    planner.ready().reserve(kDepth);
    for (const unsigned slot : ready) {
      Flight& flight = planner.flight(slot);
      moved.push_back(flight.request);
      const std::uint64_t got = std::min(flight.piece.bytes, most);
      if (flight.job().op() == Op::Write) {
        CHECK_EQUAL(::pwrite(flight.request.fd, flight.request.data, flight.request.bytes,
                             static_cast<off_t>(flight.request.offset)),
                    static_cast<ssize_t>(flight.request.bytes));
      } else {
        CHECK(::pread(flight.request.fd, flight.request.data, flight.request.bytes,
                      static_cast<off_t>(flight.request.offset)) > 0,
              "bytes");
        if (flight.block) copy_staged(flight, flight.block.data + flight.piece.lead, got);
      }
      flight.share->moved += got;
      planner.end(slot, got);
    }
    planner.finish_shares();
    return moved;
  }

  // The number of requests.
  std::size_t move_all(std::uint64_t most = UINT64_MAX) {
    std::size_t requests = 0;
    while (planner.busy()) {
      planner.plan();
      requests += move(most).size();
    }
    return requests;
  }
};

// Returns whether files here are read directly, unless the page cache has them, which can be told and changed.
bool cache_decides() {
  support::write_file(directory() / "asked", support::pattern(kBlock, 1));
  support::evict(directory() / "asked");
  const auto file = File::open(directory() / "asked", Op::Read, Cache::Auto);
  if (file->direct_possible() && cached_pages(file->direct(), 0, 0).value_or(1) == 0) return true;
  check::skipped("what is in the page cache cannot be told, or not be changed, here");
  return false;
}

}  // namespace

TEST(the_urgent_is_planned_first_and_carries_its_priority) {
  Planned planned;
  const Memory memory(3 * kBlock);
  planned.add(Op::Write, {extent(directory() / "later", Op::Write, memory)}, Priority::Background);
  planned.add(Op::Write, {extent(directory() / "first", Op::Write, memory)}, Priority::Demand);
  planned.planner.plan();
  std::vector<Priority> priorities;
  for (const Request& request : planned.move()) priorities.push_back(request.priority);
  CHECK_EQUAL(priorities.size(), std::size_t{kDepth});
  CHECK(std::is_sorted(priorities.begin(), priorities.end()), "demand first");
  planned.move_all();
}

TEST(a_job_has_no_more_in_flight_than_its_tool_says) {
  Planned planned;
  const Memory memory(kDepth * kBlock);
  Tool tool;
  tool.queue_depth = 2;
  planned.add(Op::Write, {extent(directory() / "shallow", Op::Write, memory, 0, Cache::Buffered)}, {}, tool);
  planned.planner.plan();
  CHECK_EQUAL(planned.planner.ready().size(), 2U);
  CHECK_EQUAL(planned.move_all(), std::size_t{kDepth});
}

TEST(without_a_queue_everything_fails_and_nothing_is_left) {
  Planned planned;
  const Memory memory(20 * kBlock);
  const auto one = planned.add(Op::Write, {extent(directory() / "one", Op::Write, memory)});
  const auto other = planned.add(Op::Write, {extent(directory() / "other", Op::Write, memory)}, Priority::Writeback);
  planned.planner.fail_all({Failure::Kind::System, ENOSYS, "no queue", {}});
  for (const auto& job : {one, other}) {
    CHECK(job->outcome()->done() && job->outcome()->failure(), "each to fail");
  }
  CHECK(!planned.planner.busy(), "nothing left");
}

TEST(a_stopped_job_gives_its_planned_requests_up) {
  Planned planned;
  const Memory memory(20 * kBlock);
  const auto job = planned.add(Op::Write, {extent(directory() / "stopped", Op::Write, memory)});
  planned.planner.plan();
  job->fail({Failure::Kind::System, EIO, "stopped", {}});
  planned.planner.drop_stopped();
  CHECK(planned.planner.ready().empty(), "nothing to submit");
  planned.planner.plan();
  planned.planner.finish_shares();
  CHECK(job->outcome()->done(), "the job to have ended");
  CHECK(!planned.planner.busy(), "nothing left");
}

TEST(it_waits_at_a_gate_that_others_hold_and_only_there) {
  Planned planned;
  const Memory memory(kBlock);
  const Extent wanted = extent(directory() / "gated", Op::Write, memory, 0, Cache::Buffered);
  const auto file = File::open(directory() / "gated", Op::Write, Cache::Auto);
  const GatedWrite direct{WriteKind::Direct, file->inode(), 0, kBlock};
  CHECK(enter_folios(direct), "nobody else writes");
  const auto job = planned.add(Op::Write, {wanted});
  planned.planner.plan();
  CHECK(planned.planner.ready().empty() && planned.planner.take_at_gate(), "to wait");
  leave_folios(direct);
  planned.planner.plan();
  planned.move(kBlock / 2);
  CHECK(enter_folios(direct), "nobody else writes now");
  planned.planner.plan();
  CHECK(planned.planner.ready().empty() && planned.planner.take_at_gate(), "to wait with the rest");
  leave_folios(direct);
  planned.move_all();
  CHECK(job->outcome()->done() && !job->outcome()->failure(), "success");
  planned.planner.plan();
  CHECK(!planned.planner.take_at_gate(), "nothing to wait for where nothing is left");
}

TEST(nothing_is_read_into_memory_before_it_has_its_pages) {
  const std::size_t bytes = 64 * kHugePage;
  void* const room = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto start = (reinterpret_cast<std::uintptr_t>(room) + kHugePage - 1) / kHugePage * kHugePage;
  auto* const memory = reinterpret_cast<std::byte*>(start);
  void* const beyond = static_cast<std::byte*>(room) + bytes + kHugePage - kPageSize;
  if (::madvise(beyond, kPageSize, kPopulateWrite) != 0) return check::skipped("the kernel populates nothing");
  std::byte* const last = memory + bytes - kBlock;  // populated last
  support::write_file(directory() / "populated", support::pattern(kBlock, 6));
  {
    Planned planned;
    const auto population = std::make_shared<Population>();
    population->add(memory, bytes);
    CHECK(!population->empty(), "memory without pages");
    const auto job = job_of(Op::Read, {{shared(directory() / "populated", Op::Read), last, kBlock, 0, false}});
    job->await(Population::start(population));
    job->expect_shares(1);
    planned.planner.add(Planner::ready(split(job, 1).front()));
    while (planned.planner.ready().empty()) planned.planner.plan();
    unsigned char there = 0;
    CHECK(::mincore(last, kPageSize, &there) == 0 && (there & 1) != 0, "its page");
    planned.move_all();
    CHECK(job->outcome()->done() && !job->outcome()->failure(), "success");
  }
  const auto again = std::make_shared<Population>();
  again->add(memory, bytes);
  CHECK(again->empty(), "memory with pages is left alone");
  ::munmap(room, bytes + kHugePage);
}

TEST(what_is_known_of_one_extent_is_not_believed_of_the_next) {
  if (!cache_decides()) return;
  Planned planned;
  const Bytes data = support::pattern(2 * kBlock, 3);
  support::write_file(directory() / "cold", data);
  support::evict(directory() / "cold");
  support::write_file(directory() / "cached", data);
  const Memory first(data.size()), second(data.size());
  planned.add(Op::Read, {extent(directory() / "cold", Op::Read, first, 0, Cache::Auto),
                         extent(directory() / "cached", Op::Read, second, 0, Cache::Auto)});
  planned.move_all();
  CHECK_EQUAL(planned.counters.cached_bytes.value(), data.size());
  CHECK_EQUAL(support::difference(second.data(), data.data(), data.size()), data.size());
}

TEST(half_of_a_large_read_that_is_cached_is_given_to_another_lane) {
  if (!cache_decides()) return;
  const std::string path = directory() / "large";
  const Bytes data = support::pattern(kDividedBytes + 100, 4);
  struct Case {
    const char* name;
    std::uint64_t skip;  // bytes that are not read
    Tool tool;
    Cache cache;
    bool cold, divided, alone = false;
  };
  Tool one_lane;
  one_lane.lanes = 1;
  for (const Case& now : {Case{"cached", 0, {}, Cache::Auto, false, true},
                          {"smaller", 101, {}, Cache::Auto, false, false},
                          {"one lane", 0, one_lane, Cache::Auto, false, false},
                          {"past the cache", 0, {}, Cache::Direct, false, false},
                          {"cold", 0, {}, Cache::Auto, true, false},
                          {"without another lane", 0, {}, Cache::Auto, false, false, true}}) {
    const check::Context context(now.name);
    Planned planned;
    planned.alone = now.alone;
    support::write_file(path, data);
    if (now.cold) support::evict(path);
    const Memory memory(data.size() - now.skip);
    const auto job = planned.add(Op::Read, {extent(path, Op::Read, memory, now.skip, now.cache)}, {}, now.tool);
    planned.move_all();
    CHECK_EQUAL(planned.helped.size(), std::size_t{now.divided});
    if (now.divided) {
      CHECK(!job->outcome()->done(), "the job to wait for the other half");
      CHECK_EQUAL(planned.counters.read_bytes.value(), kDividedBytes / 2 + kMaxEdge);
      planned.planner.add(std::move(planned.helped));
      planned.move_all();
      CHECK_EQUAL(planned.counters.cached_bytes.value(), data.size());
    }
    CHECK_EQUAL(job->outcome()->bytes(), memory.size());
    CHECK_EQUAL(support::difference(memory.data(), data.data() + now.skip, memory.size()), memory.size());
  }
}

TEST(small_reads_in_a_row_go_through_the_page_cache) {
  if (!cache_decides()) return;
  const Bytes data = support::pattern(16 * kBlock, 5);
  const std::string path = stored("row", data);
  struct Case {
    const char* name;
    std::vector<std::uint64_t> offsets;
    std::uint64_t bytes;
    Cache cache;
    unsigned at_once;  // reads in flight
    std::uint64_t cached;
  };
  constexpr std::uint64_t k = 4096;
  for (const Case& now : {Case{"in a row", {k, 2 * k, 3 * k, 4 * k}, k, Cache::Auto, 1, 2 * k},
                          {"largest", {0, kBlock, 2 * kBlock}, kBlock, Cache::Auto, 1, kBlock},
                          {"larger", {0, kBlock + k, 2 * kBlock + 2 * k}, kBlock + k, Cache::Auto, 1, 0},
                          {"with gaps", {0, 8 * k, 16 * k, 24 * k, 32 * k}, k, Cache::Auto, 1, 0},
                          {"interrupted", {0, k, 8 * k, 9 * k, 2 * k, 3 * k}, k, Cache::Auto, 1, 0},
                          {"two at once", {0, k, 2 * k, 3 * k}, k, Cache::Auto, 2, 0},
                          {"past the cache", {0, k, 2 * k, 3 * k}, k, Cache::Direct, 1, 0}}) {
    const check::Context context(now.name);
    Planned planned;
    std::uint64_t through_cache = 0;
    const Memory memory(now.bytes);
    for (std::size_t i = 0; i < now.offsets.size();) {
      support::evict(path);  // so that only the way says which it takes
      for (unsigned beside = 0; beside < now.at_once; ++beside) {
        planned.add(Op::Read, {extent(path, Op::Read, memory, now.offsets[i++], now.cache)});
      }
      while (planned.planner.busy()) {
        planned.planner.plan();
        for (const unsigned slot : planned.planner.ready()) {
          const Flight& flight = planned.planner.flight(slot);
          if (flight.piece.route == Route::Buffered) through_cache += flight.piece.bytes;
        }
        planned.move();
      }
      CHECK_EQUAL(support::difference(memory.data(), data.data() + now.offsets[i - 1], now.bytes), now.bytes);
    }
    CHECK_EQUAL(through_cache, now.cached);
  }
}

namespace {

struct Span {
  std::size_t extent;
  std::uint64_t from, to;
};

std::vector<Span> spans(const Share& share) {
  std::vector<Span> found;
  for (std::size_t i = share.first; i <= share.last; ++i) {
    const std::uint64_t from = i == share.first ? share.skip : 0;
    const std::uint64_t to = i == share.last ? share.stop : share.job->extents()[i].bytes;
    if (from != to) found.push_back({i, from, to});
  }
  return found;
}

std::shared_ptr<SharedFile> some_file() {
  static const std::shared_ptr<SharedFile> file = support::shared(support::directory() / "split", Op::Write);
  return file;
}

std::shared_ptr<Job> job_with(const std::vector<std::uint64_t>& sizes, std::uint64_t gap, std::uint64_t offset) {
  std::vector<Extent> extents;
  for (const std::uint64_t bytes : sizes) {
    extents.push_back({some_file(), nullptr, bytes, offset, false});
    offset += bytes + gap;
  }
  return support::job_of(Op::Write, std::move(extents));
}

void check_shares(const std::shared_ptr<Job>& job, std::size_t lanes) {
  const std::vector<Share> shares = split(job, lanes);
  CHECK(!shares.empty() && shares.size() <= lanes, "1 to " << lanes << " shares, got " << shares.size());
  std::vector<std::uint64_t> reached(job->extents().size());
  for (const Share& share : shares) {
    CHECK(share.first <= share.last && share.last < reached.size(), "extents in order within the job");
    for (const Span& span : spans(share)) {
      CHECK(span.from < span.to, "a share to go forward, got " << span.from << " to " << span.to);
      CHECK_EQUAL(reached[span.extent], span.from);
      reached[span.extent] = span.to;
      const Extent& extent = job->extents()[span.extent];
      if (span.to < extent.bytes) CHECK_EQUAL((extent.offset + span.to) % kMaxEdge, 0U);
    }
  }
  for (std::size_t i = 0; i < reached.size(); ++i) CHECK_EQUAL(reached[i], job->extents()[i].bytes);
}

}  // namespace

TEST(shares_cover_every_byte_once_and_cut_at_edges) {
  const unsigned long iterations = check::from_environment("NVME_OPS_TEST_ITERATIONS", 1000);
  for (unsigned long seed = 1; seed <= iterations; ++seed) {
    const check::Context context("seed " + std::to_string(seed));
    Random random(seed);
    std::vector<std::uint64_t> sizes(support::between(random, 1, 8));
    const std::uint64_t most = std::uint64_t{1} << support::between(random, 0, 40);
    for (std::uint64_t& bytes : sizes) bytes = support::one_in(random, 6) ? 0 : support::between(random, 1, most);
    check_shares(job_with(sizes, support::between(random, 0, 5000), support::between(random, 0, 100000)),
                 support::between(random, 1, 9));
  }
}

TEST(one_extent_is_shared_evenly) {
  const std::uint64_t bytes = (std::uint64_t{5} << 30) + 12345;
  for (std::size_t lanes = 1; lanes <= 7; ++lanes) {
    const std::vector<Share> shares = split(job_with({bytes}, 0, 777), lanes);
    CHECK_EQUAL(shares.size(), lanes);
    for (const Share& share : shares) {
      const std::uint64_t size = share.stop - share.skip;
      CHECK(size <= bytes / lanes + 2 * kMaxEdge, "nearly equal shares of " << bytes << ", got " << size);
    }
  }
}

TEST(small_extents_go_to_a_lane_each) {
  for (const std::size_t lanes : {std::size_t{2}, std::size_t{5}}) {
    const std::vector<Share> shares = split(job_with(std::vector<std::uint64_t>(lanes, 1000), 0, 0), lanes);
    CHECK_EQUAL(shares.size(), lanes);
    for (const Share& share : shares) CHECK_EQUAL(spans(share).size(), 1U);
  }
}

namespace {

constexpr std::uint64_t kStaging = StagingArea::kChunk;

struct Case {
  Op op;
  Layout layout;
  std::uintptr_t memory;
  std::uint64_t offset, bytes, block;
};

void check_route(const Case& wanted, const Piece& piece, std::uintptr_t memory, std::uint64_t left) {
  const Layout& layout = wanted.layout;
  const bool read = wanted.op == Op::Read;
  const std::uint64_t unit = read ? layout.offset_alignment : layout.edge;
  CHECK(piece.length <= kMaxTransfer, "at most " << kMaxTransfer << " bytes in one call, got " << piece.length);
  if (piece.route == Route::Buffered) {
    CHECK(piece.lead == 0 && piece.length == piece.bytes, "a buffered piece to ask for what is wanted, no more");
    if (!layout.direct) {
      CHECK(piece.bytes <= wanted.block, "at most a block of " << wanted.block << ", got " << piece.bytes);
      return;
    }
    CHECK(!read, "direct reads wherever they are possible");
    const bool partial = piece.offset % layout.edge != 0 || (left < layout.edge && !layout.padded);
    CHECK(partial && piece.offset % layout.edge + piece.bytes <= layout.edge,
          "only part of one edge to be written through the cache, got " << piece.bytes << " at " << piece.offset);
    return;
  }
  CHECK(layout.direct, "no direct piece where direct I/O is not possible");
  CHECK(piece.length <= std::max(wanted.block, unit), "a block of " << wanted.block << ", got " << piece.length);
  CHECK_EQUAL((piece.offset - piece.lead) % layout.offset_alignment, 0U);
  CHECK_EQUAL(piece.length % layout.offset_alignment, 0U);
  CHECK(piece.lead + piece.bytes <= piece.length, "the wanted bytes inside what is transferred");
  if (piece.route == Route::InPlace) {
    CHECK(layout.in_place, "no transfer in place where it is not worth it");
    CHECK_EQUAL(memory % layout.memory_alignment, 0U);
    CHECK(piece.lead == 0 && piece.length == piece.bytes, "nothing beside the caller's memory to be touched");
  } else {
    CHECK(piece.length <= kStaging, "at most a staging block, got " << piece.length);
  }
  if (read) {
    CHECK(piece.length - piece.lead - piece.bytes < unit, "no whole sector read in vain");
  } else {
    const bool padded = layout.padded && piece.bytes == left && piece.length - piece.bytes < unit;
    CHECK(piece.offset % unit == 0 && piece.length % unit == 0 && (piece.length == piece.bytes || padded),
          "direct writes in whole edges of " << unit << ", got " << piece.length << " at " << piece.offset);
  }
}

void check_tiles(const Case& wanted) {
  std::uint64_t position = 0;
  while (position < wanted.bytes) {
    const std::uintptr_t memory = wanted.memory + position;
    const std::uint64_t left = wanted.bytes - position;
    const Piece piece =
        next_piece(wanted.op, wanted.layout, memory, wanted.offset + position, left, wanted.block, kStaging);
    CHECK_EQUAL(piece.offset, wanted.offset + position);
    CHECK(piece.bytes > 0 && piece.bytes <= left, "1 to " << left << " bytes, got " << piece.bytes);
    if (piece.bytes == 0 || piece.bytes > left) return;
    check_route(wanted, piece, memory, left);
    position += piece.bytes;
  }
}

Case random_case(Random& random) {
  Case made{};
  made.op = support::one_in(random, 2) ? Op::Read : Op::Write;
  made.layout.direct = !support::one_in(random, 5);
  made.layout.memory_alignment = std::uint64_t{1} << between(random, 0, 12);
  made.layout.offset_alignment = std::uint64_t{1} << between(random, 9, 16);
  made.layout.edge = std::max({kPageSize, made.layout.offset_alignment, std::uint64_t{1} << between(random, 12, 16)});
  made.layout.in_place = support::one_in(random, 2);
  made.layout.padded = support::one_in(random, 3);
  made.memory = 0x10000000 + (support::one_in(random, 2) ? 0 : between(random, 0, 8192));
  made.bytes = between(random, 1, std::uint64_t{1} << between(random, 1, 23));
  made.offset = between(random, 0, std::uint64_t{1} << between(random, 1, 45));
  if (support::one_in(random, 2)) made.offset -= made.offset % 4096;
  made.block = between(random, made.bytes / 500 + 1, std::uint64_t{1} << between(random, 15, 34));
  return made;
}

}  // namespace

TEST(a_padded_write_is_direct_to_its_end) {
  const Layout layout{true, 512, 512, 4096, true, false, true};
  const Piece body = next_piece(Op::Write, layout, 0x1000, 8192, 4196, 1 << 20, kStaging);
  CHECK(body.route == Route::InPlace && body.bytes == 4096, "the whole pages from where they are");
  const Piece tail = next_piece(Op::Write, layout, 0x2000, 12288, 100, 1 << 20, kStaging);
  CHECK(tail.route == Route::Staged && tail.bytes == 100 && tail.length == 4096, "the rest as a page");
}

TEST(pieces_tile_any_range_in_any_layout) {
  const unsigned long iterations = check::from_environment("NVME_OPS_TEST_ITERATIONS", 1000) * 5;
  for (unsigned long seed = 1; seed <= iterations; ++seed) {
    const check::Context context("seed " + std::to_string(seed));
    Random random(seed);
    check_tiles(random_case(random));
  }
}

TEST(blocks_beyond_32_bits_are_cut_to_what_one_call_moves) {
  const std::uint64_t bytes = std::uint64_t{9} << 30;
  for (const bool direct : {true, false}) {
    const Layout layout{direct, 512, 512, 4096, true};
    for (const Op op : {Op::Read, Op::Write}) {
      CHECK_EQUAL(next_piece(op, layout, 0x1000, 0, bytes, UINT64_MAX, kStaging).bytes, kMaxTransfer);
    }
  }
}

namespace {

constexpr std::uint64_t kChunk = 64 << 10;

std::vector<std::vector<ChunkPart>> all(const std::vector<DevicePart>& parts) {
  DeviceChunks chunks(parts, kChunk);
  std::vector<std::vector<ChunkPart>> found;
  for (;;) {
    found.push_back(chunks.next());
    if (found.back().empty()) break;
  }
  found.pop_back();
  return found;
}

}  // namespace

TEST(neighbours_share_a_chunk_without_a_gap) {
  std::vector<DevicePart> parts;
  for (std::size_t i = 0; i < 64; ++i) parts.push_back({i, 0, 1024, 100 + i * 1024, 0});
  const auto chunks = all(parts);
  CHECK_EQUAL(chunks.size(), std::size_t{2});  // the page that the first one begins in
  const DeviceChunks judge(parts, kChunk);
  for (const auto& chunk : chunks) {
    for (std::size_t i = 1; i < chunk.size(); ++i) CHECK(judge.joins(chunk[i - 1], chunk[i]), "one run");
  }
}

TEST(many_small_files_are_not_open_at_once) {
  std::vector<DevicePart> parts;
  for (std::size_t i = 0; i < 100; ++i) parts.push_back({i, 0, 10, 0, i});
  for (const auto& chunk : all(parts)) CHECK(chunk.size() <= DeviceChunks::kMostFiles, "at most 16 files");
}

TEST(whatever_the_parts_are_they_are_covered_once) {
  Random random(check::from_environment("NVME_OPS_TEST_SEED", 1));
  for (int round = 0; round < 500; ++round) {
    std::vector<DevicePart> parts;
    std::uint64_t offset = support::between(random, 0, 10000);
    for (std::uint64_t i = support::between(random, 1, 30); i > 0; --i) {
      const std::uint64_t bytes = support::between(random, 1, support::one_in(random, 4) ? 3 * kChunk : 5000);
      parts.push_back({parts.size(), 0, bytes, offset, support::between(random, 0, 1)});
      offset += bytes + (support::one_in(random, 3) ? support::between(random, 1, 9000) : 0);
    }
    std::size_t part = 0;
    std::uint64_t from = 0;
    for (const auto& chunk : all(parts)) {
      std::uint64_t used = 0;
      for (const ChunkPart& each : chunk) {
        CHECK_EQUAL(each.part, part);
        CHECK_EQUAL(each.from, from);
        CHECK(each.place >= used && each.place + each.bytes <= kChunk, "inside the chunk, beside the others");
        CHECK_EQUAL(each.place % kPageSize, (parts[part].offset + from) % kPageSize);
        CHECK_EQUAL(each.first, from == 0);
        used = each.place + each.bytes;
        from += each.bytes;
        CHECK_EQUAL(each.last, from == parts[part].bytes);
        if (each.last) ++part, from = 0;
      }
    }
    CHECK_EQUAL(part, parts.size());
  }
}

namespace {

constexpr std::uint64_t kPage = 4096;

// A file whose cached pages are known, and how often it was asked.
struct Cached {
  std::set<std::uint64_t> pages;
  unsigned asked = 0;

  std::pair<std::uint64_t, std::uint64_t> operator()(std::uint64_t offset, std::uint64_t bytes) {
    ++asked;
    const std::uint64_t first = offset / kPage, last = (offset + bytes - 1) / kPage;
    const auto found = std::distance(pages.lower_bound(first), pages.upper_bound(last));
    return {static_cast<std::uint64_t>(found), last - first + 1};
  }
};

// How many pieces of a run are said to be there in full; each must be what the file says of it alone.
unsigned resident_pieces(Cached& file, std::uint64_t start, std::uint64_t end, std::uint64_t piece) {
  Residency known;
  Cached truth = file;
  unsigned found = 0;
  for (std::uint64_t at = start; at < end; at += piece) {
    const std::uint64_t bytes = std::min(piece, end - at);
    const bool resident = known.covers(at, bytes, end, file);
    const auto [there, all] = truth(at, bytes);
    CHECK_EQUAL(resident, there == all);
    found += resident ? 1 : 0;
  }
  return found;
}

}  // namespace

TEST(whatever_is_cached_each_piece_is_judged_as_if_asked_about_alone) {
  Random random(check::from_environment("NVME_OPS_TEST_SEED", 1));
  for (int round = 0; round < 300; ++round) {
    Cached file;
    const std::uint64_t pages = support::between(random, 1, 300);
    for (std::uint64_t page = 0; page < pages;) {
      const std::uint64_t run = support::between(random, 1, 40);
      if (support::one_in(random, 2)) {
        for (std::uint64_t i = page; i < page + run; ++i) file.pages.insert(i);
      }
      page += run;
    }
    const std::uint64_t start = support::between(random, 0, pages * kPage - 1);
    resident_pieces(file, start, pages * kPage, support::between(random, 1, 20 * kPage));
  }
}

TEST(what_was_wrong_is_asked_again) {
  Cached file;
  for (std::uint64_t page = 0; page < 8; ++page) file.pages.insert(page);
  Residency known;
  CHECK(known.covers(0, kPage, 8 * kPage, file), "resident");
  file.pages.clear();
  known.forget();
  CHECK(!known.covers(0, kPage, 8 * kPage, file), "gone");
  CHECK_EQUAL(file.asked, 2U);
}
