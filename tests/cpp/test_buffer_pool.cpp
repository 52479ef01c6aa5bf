// BufferPool: aligned, reused, bounded, never two owners.
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/buffer_pool.h"
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

TEST(at_most_a_fifth_of_a_close_allocation_is_lost) {
  Random random(7);
  for (int i = 0; i < 200; ++i) {
    const std::size_t bytes = between(random, kHugePage / 4, std::uint64_t{1} << between(random, 19, 27));
    std::byte* const memory = pool().allocate_closely(bytes);
    const std::size_t size = pool().statistics().live_bytes;
    CHECK(size >= bytes && size - bytes <= size / 5, size << " bytes for " << bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % (kHugePage / 16) == 0, "aligned for direct I/O");
    CHECK(pool().huge(memory, bytes), "huge pages");
    memory[0] = memory[size - 1] = std::byte{1};
    pool().release(memory);
  }
  pool().trim();
  CHECK_EQUAL(pool().statistics().cached_bytes, std::size_t{0});
}

TEST(close_allocations_of_a_size_share_huge_pages) {
  const std::size_t size = kHugePage + kHugePage / 4;
  std::vector<std::byte*> several;
  for (int i = 0; i < 4; ++i) several.push_back(pool().allocate_closely(size - i));
  CHECK_EQUAL(pool().statistics().live_bytes, 4 * size);
  CHECK_EQUAL(pool().statistics().cached_bytes, std::size_t{0});
  CHECK_EQUAL(std::set<std::byte*>(several.begin(), several.end()).size(), std::size_t{4});
  several.push_back(pool().allocate_closely(size));
  CHECK_EQUAL(pool().statistics().cached_bytes, 3 * size);
  for (std::byte* const memory : several) pool().release(memory);
  CHECK_EQUAL(pool().statistics().cached_bytes, 8 * size);
  std::byte* const again = pool().allocate(5 * kHugePage);
  CHECK_EQUAL(pool().statistics().cached_bytes, 4 * size);
  pool().release(again);
  pool().trim();
  CHECK_EQUAL(pool().statistics().live_bytes, std::size_t{0});
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

TEST(contains_knows_what_is_live) {
  std::byte* const memory = pool().allocate(3 * kHugePage);
  CHECK(pool().contains(memory, 3 * kHugePage), "the whole block to be contained");
  CHECK(pool().contains(memory + 100, 3 * kHugePage - 100), "its tail to be contained");
  CHECK(!pool().contains(memory + 1, 3 * kHugePage), "what passes its end not to be contained");
  CHECK(!pool().contains(memory - 1, 1), "what lies before it not to be contained");
  CHECK(!pool().contains(memory + 1, SIZE_MAX), "a length that wraps not to be contained");
  pool().release(memory);
  CHECK(!pool().contains(memory, 1), "released memory not to be contained");
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
