// StagingArea: bounded, no two blocks overlap, the budget is shared by all areas.
#include <sys/resource.h>

#include <fstream>
#include <map>
#include <thread>

#include "check.h"
#include "engine/buffer_pool.h"
#include "engine/staging.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

constexpr std::size_t kChunk = StagingArea::kChunk;

std::shared_ptr<StagingBudget> budget_of(std::size_t chunks) {
  return std::make_shared<StagingBudget>(chunks);
}

std::vector<StagingBlock> fill(StagingArea& area, std::size_t bytes) {
  std::vector<StagingBlock> blocks;
  while (const StagingBlock block = area.allocate(bytes)) blocks.push_back(block);
  return blocks;
}

void release(StagingArea& area, const std::vector<StagingBlock>& blocks) {
  for (const StagingBlock& block : blocks) area.release(block);
}

}  // namespace

TEST(blocks_never_overlap_and_lie_in_their_chunk) {
  const unsigned long iterations = check::from_environment("NVME_OPS_TEST_ITERATIONS", 1000) / 50 + 1;
  for (unsigned long seed = 1; seed <= iterations; ++seed) {
    const check::Context context("seed " + std::to_string(seed));
    Random random(seed);
    StagingArea area(budget_of(3));
    std::map<std::byte*, StagingBlock> live;
    for (int step = 0; step < 400; ++step) {
      if (support::one_in(random, 2) && !live.empty()) {
        const auto chosen = std::next(live.begin(), static_cast<long>(between(random, 0, live.size() - 1)));
        area.release(chosen->second);
        live.erase(chosen);
        continue;
      }
      const std::size_t bytes = between(random, 1, std::uint64_t{1} << between(random, 1, 21));
      const StagingBlock block = area.allocate(bytes);
      if (!block) continue;
      CHECK(block.bytes >= bytes, "at least " << bytes << " bytes, got " << block.bytes);
      CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(block.data) % kPageSize, 0U);
      std::byte* const chunk = area.chunk(block.chunk);
      CHECK(block.data >= chunk && block.data + block.bytes <= chunk + kChunk, "a block inside its chunk");
      const auto after = live.lower_bound(block.data);
      CHECK(after == live.end() || block.data + block.bytes <= after->first, "no overlap with the next block");
      CHECK(after == live.begin() || std::prev(after)->first + std::prev(after)->second.bytes <= block.data,
            "no overlap with the block before");
      live.emplace(block.data, block);
      CHECK(area.held_bytes() <= 4 * kChunk, "at most 4 chunks, got " << area.held_bytes());
    }
    for (const auto& entry : live) area.release(entry.second);
    area.trim();
    CHECK_EQUAL(area.held_bytes(), std::size_t{0});
  }
}

TEST(what_is_allowed_can_be_used_in_full_and_no_more) {
  for (const std::size_t bytes : {std::size_t{4096}, std::size_t{64} << 10, std::size_t{1} << 20, kChunk}) {
    StagingArea area(budget_of(2));
    const std::vector<StagingBlock> blocks = fill(area, bytes);
    CHECK_EQUAL(blocks.size(), 3 * kChunk / bytes);
    CHECK_EQUAL(area.held_bytes(), 3 * kChunk);
    area.release(blocks.front());
    const StagingBlock again = area.allocate(bytes);
    CHECK(again.data == blocks.front().data, "the released block to be handed out again");
    release(area, blocks);
  }
}

TEST(one_area_never_holds_more_than_a_lane_may) {
  StagingArea area(budget_of(1000));
  release(area, fill(area, kChunk));
  CHECK_EQUAL(area.held_bytes(), kLaneStagingBytes);
}

TEST(areas_share_a_budget_beyond_their_first_chunk) {
  const auto budget = budget_of(3);
  StagingArea one(budget), other(budget), third(budget);
  const auto greedy = fill(one, kChunk);
  CHECK_EQUAL(greedy.size(), std::size_t{4});
  const auto modest = fill(other, kChunk);
  CHECK_EQUAL(modest.size(), std::size_t{1});
  release(one, greedy);
  const auto last = fill(third, kChunk);  // released blocks still belong to their area
  CHECK_EQUAL(last.size(), std::size_t{1});
  one.trim();
  const auto more = fill(other, kChunk);
  CHECK_EQUAL(more.size(), std::size_t{3});
  release(other, modest);
  release(other, more);
  release(third, last);
}

TEST(threads_never_exceed_the_budget_together) {
  constexpr std::size_t kExtra = 2, kAreas = 4;
  const auto budget = budget_of(kExtra);
  std::atomic<std::size_t> held{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kAreas; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        StagingArea area(budget);
        const auto blocks = fill(area, kChunk);
        const std::size_t now = held.fetch_add(blocks.size()) + blocks.size();
        CHECK(!blocks.empty(), "every area to get its first chunk");
        CHECK(now <= kAreas + kExtra, "at most " << kAreas + kExtra << " chunks in all, got " << now);
        held.fetch_sub(blocks.size());
        release(area, blocks);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  StagingArea last(budget);
  const auto blocks = fill(last, kChunk);
  CHECK_EQUAL(blocks.size(), kExtra + 1);
  release(last, blocks);
}

TEST(memory_that_could_not_be_had_is_not_charged) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  check::skipped("sanitizers need the address space that this test takes away");
#else
  const auto budget = budget_of(2);
  StagingArea area(budget);
  std::vector<StagingBlock> blocks{area.allocate(kChunk)};
  BufferPool::instance().trim();
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{};
  ::getrlimit(RLIMIT_AS, &before);
  const rlimit tight{pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + (256 << 10), before.rlim_max};
  ::setrlimit(RLIMIT_AS, &tight);
  StagingArea other(budget);
  const bool granted = static_cast<bool>(area.allocate(kChunk));
  const auto failure = check::failure_of([&] { other.allocate(kChunk); });
  ::setrlimit(RLIMIT_AS, &before);
  CHECK(!granted, "an area that has memory to do with what it has");
  CHECK_FAILURE(failure, Memory, ENOMEM, "allocating");
  for (const StagingBlock& block : fill(area, kChunk)) blocks.push_back(block);
  CHECK_EQUAL(blocks.size(), std::size_t{3});
  release(area, blocks);
#endif
}
