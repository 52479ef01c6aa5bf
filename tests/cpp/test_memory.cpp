// BufferPool, StagingArea and Collapse: aligned, reused, bounded, never two owners.
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/buffer_pool.h"
#include "engine/collapse.h"
#include "engine/staging.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

BufferPool& pool() {
  return BufferPool::instance();
}

}  // namespace

TEST(allocations_from_a_quarter_of_a_huge_page_on_are_in_huge_pages) {
  std::byte* const small = pool().allocate(kHugePage / 8);
  std::byte* const part = pool().allocate(kHugePage / 4);
  std::byte* const large = pool().allocate(2 * kHugePage);
  CHECK(pool().contains(small, kHugePage / 8) && !pool().huge(small, kHugePage / 8), "small pages");
  CHECK(pool().huge(part, kHugePage / 4), "a part of a huge page");
  CHECK(pool().huge(large + kPageSize, kPageSize), "a part of a large allocation is in huge pages");
  CHECK(!pool().huge(large + kHugePage, 2 * kHugePage), "what reaches beyond the allocation is not of the pool");
  pool().release(small);
  pool().release(part);
  CHECK(!pool().huge(large - kPageSize, 2 * kPageSize), "nor what begins before it");
  pool().release(large);
  pool().trim();
  CHECK_EQUAL(pool().statistics().cached_bytes, std::size_t{0});
}

TEST(parts_of_a_huge_page_are_one_owner_each) {
  std::set<std::byte*> parts, pages;
  for (int i = 0; i < 8; ++i) {
    std::byte* const memory = pool().allocate(kHugePage / 4);
    parts.insert(memory);
    pages.insert(memory - reinterpret_cast<std::uintptr_t>(memory) % kHugePage);
  }
  CHECK_EQUAL(parts.size(), std::size_t{8});
  CHECK_EQUAL(pages.size(), std::size_t{2});
  CHECK_EQUAL(pool().statistics().live_bytes, 2 * kHugePage);
  CHECK_EQUAL(pool().statistics().cached_bytes, std::size_t{0});

  std::byte* const half = pool().allocate(kHugePage / 2);
  CHECK(pages.count(half - reinterpret_cast<std::uintptr_t>(half) % kHugePage) == 0, "halves have a page of their own");
  CHECK_EQUAL(pool().statistics().cached_bytes, kHugePage / 2);
  std::byte* const other = pool().allocate(kHugePage / 2);
  CHECK(other == half + kHugePage / 2 || half == other + kHugePage / 2, "the other half");
  pool().release(half);
  CHECK(pool().contains(other, kHugePage / 2) && !pool().contains(half, 1), "only one of them is released");
  CHECK(pool().allocate(kHugePage / 2) == half, "a free part is used again");
  pool().release(half);
  pool().release(other);

  std::byte* const one = *parts.begin();
  pool().release(one);
  CHECK(pool().allocate(kHugePage / 4) == one, "in a page that was full too");
  for (std::byte* const memory : parts) pool().release(memory);
  CHECK_EQUAL(pool().statistics().live_bytes, std::size_t{0});
  CHECK_EQUAL(pool().statistics().cached_bytes, 3 * kHugePage);
  pool().trim();
  CHECK_EQUAL(pool().statistics().cached_bytes, std::size_t{0});
}

TEST(released_memory_serves_the_next_of_about_its_size) {
  std::byte* const first = pool().allocate(16 * kHugePage);
  pool().release(first);
  CHECK_EQUAL(pool().statistics().cached_bytes, 16 * kHugePage);
  std::byte* const second = pool().allocate(15 * kHugePage);
  CHECK(second == first, "15 huge pages to reuse the block of 16");
  CHECK_EQUAL(pool().statistics().live_bytes, 16 * kHugePage);
  std::byte* const third = pool().allocate(15 * kHugePage);
  CHECK(third != first, "live memory not to be handed out again");
  pool().release(second);
  std::byte* const small = pool().allocate(kHugePage);
  CHECK(small != first, "a block of 16 not to be spent on one huge page");
  pool().release(third);
  pool().release(small);
  pool().trim();
}

// Its pages are the child's too: small ones would take the place of huge ones at the first write.
TEST(what_a_forked_child_has_too_is_not_kept) {
  std::byte* const cached = pool().allocate(16 * kHugePage);
  std::byte* const live = pool().allocate(8 * kHugePage);
  pool().release(cached);
  CHECK_EQUAL(pool().statistics().cached_bytes, 16 * kHugePage);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(pool().statistics().cached_bytes == 0 ? 0 : 1);
  int status = 1;
  ::waitpid(child, &status, 0);
  CHECK_EQUAL(status, 0);
  CHECK_EQUAL(pool().statistics().cached_bytes, 0U);
  CHECK_EQUAL(pool().statistics().live_bytes, 8 * kHugePage);
  pool().release(live);
  CHECK_EQUAL(pool().statistics().cached_bytes, 0U);
  pool().release(pool().allocate(8 * kHugePage));
  CHECK_EQUAL(pool().statistics().cached_bytes, 8 * kHugePage);
  pool().trim();
}

TEST(what_is_kept_stays_within_the_bound) {
  const std::size_t bound = 4 * kHugePage;
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(pool().allocate(kHugePage));
  for (std::byte* const block : blocks) {
    pool().release(block, bound);
    CHECK(pool().statistics().cached_bytes <= bound, "at most " << bound << " bytes kept");
  }
  CHECK_EQUAL(pool().statistics().cached_bytes, bound);
  pool().release(pool().allocate(8 * kHugePage), bound);
  CHECK_EQUAL(pool().statistics().cached_bytes, bound);
  pool().trim();
  for (int i = 0; i < 20; ++i) blocks.push_back(pool().allocate(20 * kHugePage));
  blocks.erase(blocks.begin(), blocks.begin() + 6);
  for (std::byte* const block : blocks) pool().release(block);
  CHECK(pool().statistics().cached_bytes <= kPoolBytes, "at most " << kPoolBytes << " bytes kept by default");
  CHECK_EQUAL(pool().statistics().live_bytes, std::size_t{0});
  pool().trim();
}

TEST(more_than_there_is_raises) {
  CHECK_FAILURE(check::failure_of([] { pool().allocate(SIZE_MAX); }), Memory, ENOMEM, "allocating");
  CHECK_FAILURE(check::failure_of([] { pool().allocate(SIZE_MAX / 4); }), Memory, ENOMEM, "allocating");
  CHECK_EQUAL(pool().statistics().live_bytes, std::size_t{0});
}

TEST(threads_never_own_the_same_memory) {
  std::vector<std::thread> threads;
  for (unsigned id = 1; id <= 4; ++id) {
    threads.emplace_back([id] {
      Random random(id);
      std::vector<std::pair<std::byte*, std::size_t>> mine;
      for (int step = 0; step < 400; ++step) {
        if (mine.size() > 8 || (support::one_in(random, 2) && !mine.empty())) {
          const auto [memory, bytes] = mine.back();
          CHECK(memory[0] == std::byte(id) && memory[bytes - 1] == std::byte(id), "memory of one owner");
          mine.pop_back();
          pool().release(memory, between(random, 0, 3) * kHugePage);
          continue;
        }
        const std::size_t bytes = between(random, 1, std::uint64_t{1} << between(random, 1, 23));
        const bool closely = support::one_in(random, 2);
        std::byte* const memory = closely ? pool().allocate_closely(bytes) : pool().allocate(bytes);
        memory[0] = memory[bytes - 1] = std::byte(id);
        mine.emplace_back(memory, bytes);
      }
      for (const auto& [memory, bytes] : mine) pool().release(memory);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(pool().statistics().live_bytes, std::size_t{0});
  pool().trim();
}

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

namespace {

constexpr std::size_t kBytes = 8 * kHugePage;
constexpr int kMadviseCollapse = 25;

// Memory in small pages, each of which begins with its number.
class SmallPages {
public:
  SmallPages() {
    room_ = ::mmap(nullptr, kBytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto start = (reinterpret_cast<std::uintptr_t>(room_) + kHugePage - 1) / kHugePage * kHugePage;
    data = reinterpret_cast<std::byte*>(start);
    ::madvise(data, kBytes, MADV_NOHUGEPAGE);
    for (std::size_t page = 0; page < kBytes / kPageSize; ++page) number(page) = page;
    ::madvise(data, kBytes, MADV_HUGEPAGE);
  }
  ~SmallPages() { ::munmap(room_, kBytes + kHugePage); }

  std::size_t& number(std::size_t page) { return *reinterpret_cast<std::size_t*>(data + page * kPageSize); }

  bool intact() {
    for (std::size_t page = 0; page < kBytes / kPageSize; ++page) {
      if (number(page) != page) return false;
    }
    return true;
  }

  // Of the mapping the memory lies in, which may be part of a larger one.
  std::size_t huge_bytes() const {
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool here = false;
    std::size_t found = 0;
    while (std::getline(smaps, line)) {
      std::size_t begin = 0, end = 0, kib = 0;
      if (std::sscanf(line.c_str(), "%zx-%zx ", &begin, &end) == 2) {
        here = begin < reinterpret_cast<std::uintptr_t>(data) + kBytes && reinterpret_cast<std::uintptr_t>(data) < end;
      } else if (here && std::sscanf(line.c_str(), "AnonHugePages: %zu kB", &kib) == 1) {
        found += kib << 10;
      }
    }
    return found;
  }

  std::byte* data;

private:
  void* room_;
};

bool kernel_collapses() {
  SmallPages pages;
  return ::madvise(pages.data, kHugePage, kMadviseCollapse) == 0;
}

template <class Condition>
bool comes_true(Condition&& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

}  // namespace

TEST(small_pages_become_huge_while_they_are_used) {
  if (!kernel_collapses()) return check::skipped("the kernel has no MADV_COLLAPSE, or no huge page at the moment");
  SmallPages pages;
  const auto collapse = Collapse::start(pages.data, kBytes);
  CHECK(collapse != nullptr, "a thread was to be had");
  bool wrong = false;
  CHECK(comes_true([&] {
          wrong |= !pages.intact();
          return pages.huge_bytes() == kBytes;
        }),
        "huge: " << pages.huge_bytes() << " of " << kBytes);
  CHECK(!wrong && pages.intact(), "every byte is where it was");
  collapse->stop();
}

TEST(nothing_is_touched_after_stop) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    SmallPages pages;
    const auto collapse = Collapse::start(pages.data, kBytes, std::chrono::milliseconds(0));
    if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(between(random, 0, 30)));
    collapse->stop();
    collapse->stop();
    CHECK(pages.intact(), "every byte is where it was");
  }
}

TEST(a_child_stops_what_its_parent_began) {
  SmallPages pages;
  const auto collapse = Collapse::start(pages.data, kBytes);
  const pid_t child = ::fork();
  if (child == 0) {
    collapse->stop();
    ::_exit(pages.intact() ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQUAL(status, 0);
  collapse->stop();
}

TEST(without_a_whole_huge_page_there_is_nothing_to_do) {
  SmallPages pages;
  CHECK(Collapse::start(pages.data + 1, kHugePage) == nullptr, "no huge page lies in it");
  CHECK(Collapse::start(pages.data, 0) == nullptr, "no byte");
}
