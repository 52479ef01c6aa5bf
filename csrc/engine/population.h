// Populates memory that a read is about to fill and that has no pages yet, on several threads ahead of the device: the
// first touch costs more than a fast device needs for the data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/limits.h"

namespace nvme_ops {

// The parts of one call's memory that have no pages: whole huge pages, in memory that has none at all.
class Population {
public:
  // Call before start().
  void add(std::byte* memory, std::uint64_t bytes);
  bool empty() const { return starts_.empty(); }

  // Populates on the process's threads, in the order added, until the result is destroyed. Without a thread: as usual.
  static std::shared_ptr<const Population> start(std::shared_ptr<Population> population);

  // Returns false while pages of [memory, memory + bytes) are missing.
  bool reached(const std::byte* memory, std::uint64_t bytes) const;

private:
  friend class Populators;
  friend bool populate_now(std::byte* memory, std::uint64_t bytes);

  bool populate_next();  // false: nothing is left to begin
  void wait_until_idle() const;
  void stop();

  struct Part {
    std::byte* begin;
    std::byte* end;
    std::size_t first;  // index of its first chunk

    void advise(int advice) const noexcept;
  };

  static constexpr std::size_t kChunk = kHugePage;

  std::vector<Part> parts_;
  std::vector<std::byte*> starts_;  // of all chunks
  std::unique_ptr<std::atomic<bool>[]> done_;
  std::atomic<std::size_t> next_{0};
  mutable std::atomic<bool> behind_{true};  // not far ahead of the transfers
  std::atomic<std::size_t> busy_{0};
  std::atomic<bool> small_{false};  // whether some pages are small
  unsigned long generation_ = 0;
};

// Populates memory on several threads; returns once all of it has pages: whether some may be small.
bool populate_now(std::byte* memory, std::uint64_t bytes);

// For memory filled sequentially: populates, on this thread, its huge pages that begin in [start, stop).
void populate_in_part(std::byte* memory, std::uint64_t bytes, std::uint64_t start, std::uint64_t stop);

}  // namespace nvme_ops
