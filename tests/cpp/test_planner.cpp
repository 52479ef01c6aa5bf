// Planner: from shares to requests, without a queue.
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "base/limits.h"
#include "check.h"
#include "engine/folio_gate.h"
#include "engine/lane.h"
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
