#include "engine/buffer_pool.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <numeric>

#include "base/error.h"

namespace nvme_ops {
namespace {

Failure no_room(std::size_t bytes) noexcept {
  try {
    return {Failure::Kind::Memory, ENOMEM, "allocating " + std::to_string(bytes) + " bytes: " + error_text(ENOMEM), {}};
  } catch (...) {
    return out_of_memory();
  }
}

// Rounds up, so that freed memory fits later requests: small sizes to a power of two, large ones to whole huge pages.
std::size_t size_class(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) raise(no_room(bytes));
  if (bytes >= kHugePage) return (bytes + kHugePage - 1) / kHugePage * kHugePage;
  std::size_t size = kPageSize;
  while (size < bytes) size *= 2;
  return size;
}

// Four sizes from each power of two to the next: at most a fifth of one is lost.
std::size_t close_class(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) raise(no_room(bytes));
  std::size_t step = BufferPool::kLeastPart / 4;
  while (step < kHugePage && 8 * step < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// The fewest huge pages that allocations of that size fill.
std::size_t pages_of(std::size_t part) {
  return std::lcm(part, kHugePage);
}

// A bit for each of them.
unsigned parts_of(std::size_t part) {
  return (1U << (pages_of(part) / part)) - 1;
}

// MAP_HUGE_2MB: the default size may be 1 GiB.
constexpr int kHugeTlbPages = 21 << 26;

void* map(void* hint, std::size_t bytes, int flags) {
  return ::mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

bool reserved_pages_wanted() {
  static const bool wanted = [] {
    const char* const text = std::getenv("NVME_OPS_HUGETLB");
    return text != nullptr && *text != '\0' && std::string(text) != "0";
  }();
  return wanted;
}

std::byte* map_pages(std::size_t bytes) {
  if (bytes < kHugePage) {
    void* memory = map(nullptr, bytes, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  }
  // On request only: a forked child that writes to a reserved page needs another, and is killed if there is none.
  void* reserved = reserved_pages_wanted() ? map(nullptr, bytes, MAP_HUGETLB | kHugeTlbPages) : MAP_FAILED;
  if (reserved != MAP_FAILED) {
    // A limit on huge pages otherwise shows at the first touch, as SIGBUS: better to fail here.
    if (::madvise(reserved, bytes, kPopulateWrite) == 0) return static_cast<std::byte*>(reserved);
    ::munmap(reserved, bytes);
  }

  void* room = map(nullptr, bytes + kHugePage, 0);
  if (room == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(room);
  const std::size_t head = (kHugePage - reinterpret_cast<std::uintptr_t>(start) % kHugePage) % kHugePage;
  if (head > 0) ::munmap(start, head);
  if (kHugePage - head > 0) ::munmap(start + head + bytes, kHugePage - head);
  ::madvise(start + head, bytes, MADV_HUGEPAGE);  // refused only where there are none: then pages are small
  return start + head;
}

// Parses a number of bytes, with K, M or G.
std::size_t bound_from_environment() {
  const char* text = std::getenv("NVME_OPS_POOL_BYTES");
  if (text == nullptr || *text == '\0') return kPoolBytes;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  const std::string units = "KMG";
  const std::size_t unit = *end == '\0' ? std::string::npos : units.find(*end);
  if (end == text || *text == '-' || (*end != '\0' && (unit == std::string::npos || end[1] != '\0'))) {
    raise(bad_argument(std::string("NVME_OPS_POOL_BYTES='") + text + "' is not a number of bytes such as 256M"));
  }
  return *end == '\0' ? number : number << (10 * (unit + 1));
}

}  // namespace

BufferPool::BufferPool() : bound_(bound_from_environment()) {
  // A forked child must find the lock free. Both start without cached memory, which may be in reserved huge pages.
  constexpr auto forked = [] {
    ++instance().forks_;
    instance().free_cached(0);
    instance().mutex_.unlock();
  };
  pthread_atfork([] { instance().mutex_.lock(); }, forked, forked);
}

BufferPool& BufferPool::instance() {
  static BufferPool* const pool = new BufferPool;  // outlives every tensor, also those freed at exit
  return *pool;
}

std::byte* BufferPool::allocate(std::size_t bytes) {
  const std::size_t size = size_class(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  return size >= kLeastPart && size < kHugePage ? allocate_part(size) : allocate_block(size);
}

std::byte* BufferPool::allocate_closely(std::size_t bytes) {
  const std::size_t size = close_class(std::max(bytes, kLeastPart));
  const std::lock_guard<std::mutex> lock(mutex_);
  return size % kHugePage != 0 ? allocate_part(size) : allocate_block(size);
}

std::byte* BufferPool::allocate_block(std::size_t size) {
  const auto [memory, bytes] = take_pages(size, size / 8);
  try {
    live_.emplace(memory, Allocation{bytes, open_.end(), forks_});
  } catch (...) {
    ::munmap(memory, bytes);
    throw;
  }
  live_bytes_ += bytes;
  return memory;
}

// Takes a cached block, up to `slack` bytes larger, or maps a new one; gives up all cached ones for it if need be.
std::pair<std::byte*, std::size_t> BufferPool::take_pages(std::size_t bytes, std::size_t slack) {
  const auto found = cached_.lower_bound(bytes);
  if (found != cached_.end() && found->first - bytes <= slack) {
    const auto [size, memory] = *found;
    cached_bytes_ -= size;
    cached_.erase(found);
    return {memory, size};
  }
  std::byte* memory = map_pages(bytes);
  if (memory == nullptr) {
    free_cached(0);
    memory = map_pages(bytes);
  }
  if (memory == nullptr) raise(no_room(bytes));
  return {memory, bytes};
}

std::byte* BufferPool::allocate_part(std::size_t part) {
  const auto fits = [part](const Divided& page) { return page.part == part; };
  auto page = std::find_if(open_.begin(), open_.end(), fits);
  if (page == open_.end()) {
    open_.push_front({nullptr, part, parts_of(part)});
    page = open_.begin();
    try {
      page->memory = take_pages(pages_of(part), 0).first;
    } catch (...) {
      open_.erase(page);
      throw;
    }
    free_parts_ += pages_of(part);
  }
  const unsigned bit = page->free & -page->free;
  std::byte* const memory = page->memory + static_cast<std::size_t>(__builtin_ctz(bit)) * part;
  live_.emplace(memory, Allocation{part, page, forks_});
  page->free &= ~bit;
  if (page->free == 0) full_.splice(full_.begin(), open_, page);
  free_parts_ -= part;
  live_bytes_ += part;
  return memory;
}

void BufferPool::release(std::byte* memory, std::size_t bound) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(memory);
  if (found == live_.end()) return;
  const auto [size, page, forks] = found->second;
  live_.erase(found);
  live_bytes_ -= size;
  if (page == open_.end()) {
    if (forks != forks_) bound = 0;
    release_block(memory, size, bound);
  } else if (std::byte* const whole = release_part(memory, page)) {
    release_block(whole, pages_of(size), bound);
  }
}

// Returns the pages if no part of them is in use any more; they are not divided then.
std::byte* BufferPool::release_part(std::byte* memory, Pages::iterator page) noexcept {
  if (page->free == 0) open_.splice(open_.begin(), full_, page);
  page->free |= 1U << (static_cast<std::size_t>(memory - page->memory) / page->part);
  free_parts_ += page->part;
  if (page->free != parts_of(page->part)) return nullptr;
  std::byte* const whole = page->memory;
  free_parts_ -= pages_of(page->part);
  open_.erase(page);
  return whole;
}

void BufferPool::release_block(std::byte* memory, std::size_t size, std::size_t bound) noexcept {
  // Memory with a bound of its own counts only against its kind: cached tensors do not displace staging memory.
  if (size > bound || (bound < bound_ && (cached_.count(size) + 1) * size > bound)) {
    ::munmap(memory, size);
    return;
  }
  if (bound == bound_) free_cached(bound - size);
  try {
    cached_.emplace(size, memory);
    cached_bytes_ += size;
  } catch (...) {  // no memory left to record it
    ::munmap(memory, size);
  }
}

bool BufferPool::huge(const std::byte* memory, std::size_t bytes) const {
  return allocation(memory, bytes) >= kLeastPart;
}

std::size_t BufferPool::allocation(const std::byte* memory, std::size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto after = live_.upper_bound(memory);
  if (after == live_.begin()) return 0;
  const auto& [start, entry] = *std::prev(after);
  const std::size_t size = entry.bytes;
  const bool inside = memory >= start && bytes <= size && static_cast<std::size_t>(memory - start) <= size - bytes;
  return inside ? size : 0;
}

void BufferPool::trim(std::size_t keep) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_cached(keep);
}

BufferPool::Statistics BufferPool::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {live_bytes_, cached_bytes_ + free_parts_};
}

// Frees the largest first: they are least likely to be needed again in the same size.
void BufferPool::free_cached(std::size_t bound) noexcept {
  while (cached_bytes_ > bound) {
    const auto largest = std::prev(cached_.end());
    ::munmap(largest->second, largest->first);
    cached_bytes_ -= largest->first;
    cached_.erase(largest);
  }
}

}  // namespace nvme_ops
