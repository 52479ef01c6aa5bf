// Memory the device can fill fastest: huge pages, aligned for direct I/O, kept for reuse within a bound.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace nvme_ops {

class BufferPool {
public:
  struct Statistics {
    std::size_t live_bytes;    // handed out
    std::size_t cached_bytes;  // freed, kept for reuse
  };

  static BufferPool& instance();

  // At least `bytes` bytes aligned to a page, to 2 MiB from that size on. Contents are arbitrary. Throws IoError.
  std::byte* allocate(std::size_t bytes);

  // Takes back what allocate() returned, and keeps it for the next allocate() while no more than `bound` is kept.
  void release(std::byte* memory, std::size_t bound) noexcept;
  void release(std::byte* memory) noexcept { release(memory, bound_); }

  // Whether [memory, memory + bytes) lies inside one live allocation.
  bool contains(const std::byte* memory, std::size_t bytes) const;

  void trim() noexcept;  // gives all cached memory back to the system
  Statistics statistics() const;

private:
  BufferPool();
  void free_cached(std::size_t bound) noexcept;

  mutable std::mutex mutex_;
  std::map<const std::byte*, std::size_t> live_;
  std::multimap<std::size_t, std::byte*> cached_;
  std::size_t live_bytes_ = 0;
  std::size_t cached_bytes_ = 0;
  std::size_t bound_;
};

}  // namespace nvme_ops
