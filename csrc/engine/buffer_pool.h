// Memory that devices fill fastest: huge pages, aligned for direct I/O, cached for reuse within a bound. What a forked
// child shares is not reused: the first write would split its huge pages.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "base/limits.h"

namespace nvme_ops {

class BufferPool {
public:
  struct Statistics {
    std::size_t live_bytes;    // handed out
    std::size_t cached_bytes;  // freed, kept for reuse, the free parts of divided pages included
  };

  // A smaller allocation would keep a whole huge page alive: that is not worth it.
  static constexpr std::size_t kLeastPart = kHugePage / 4;

  static BufferPool& instance();

  // Allocates uninitialized bytes, aligned to a page, from 2 MiB on to that, in huge pages from 512 KiB on. May throw.
  std::byte* allocate(std::size_t bytes);

  // The same, aligned to 128 KiB, in sizes closer to `bytes`: several allocations of one size share huge pages.
  std::byte* allocate_closely(std::size_t bytes);

  // Releases what was allocated; caches it for the next allocate() while at most `bound` bytes are cached.
  void release(std::byte* memory, std::size_t bound) noexcept;
  void release(std::byte* memory) noexcept { release(memory, bound_); }

  // Returns whether [memory, memory + bytes) lies inside one live allocation.
  bool contains(const std::byte* memory, std::size_t bytes) const { return allocation(memory, bytes) > 0; }

  // Returns whether that allocation is in huge pages; a small one is in pages like any other memory's.
  bool huge(const std::byte* memory, std::size_t bytes) const;

  void trim(std::size_t keep = 0) noexcept;  // gives cached memory back to the system, except so many bytes
  Statistics statistics() const;

private:
  // Huge pages that several allocations share, each of `part` bytes.
  struct Divided {
    std::byte* memory;
    std::size_t part;
    unsigned free;  // a bit for each part
  };
  using Pages = std::list<Divided>;

  struct Allocation {
    std::size_t bytes;
    Pages::iterator page;  // of which it is a part; the end of open_ if it is none
    unsigned forks;        // of this process before it was made
  };

  BufferPool();
  std::size_t allocation(const std::byte* memory, std::size_t bytes) const;  // its size; 0 if there is none
  std::pair<std::byte*, std::size_t> take_pages(std::size_t bytes, std::size_t slack);
  std::byte* allocate_block(std::size_t size);
  std::byte* allocate_part(std::size_t part);
  std::byte* release_part(std::byte* memory, Pages::iterator page) noexcept;
  void release_block(std::byte* memory, std::size_t size, std::size_t bound) noexcept;
  void free_cached(std::size_t bound) noexcept;

  mutable std::mutex mutex_;
  std::map<const std::byte*, Allocation> live_;
  std::multimap<std::size_t, std::byte*> cached_;
  Pages open_, full_;           // divided pages with and without a free part
  std::size_t free_parts_ = 0;  // bytes
  std::size_t live_bytes_ = 0;
  std::size_t cached_bytes_ = 0;
  std::size_t bound_;
  unsigned forks_ = 0;
};

}  // namespace nvme_ops
