// Pages for memory that has none yet and that a read is about to fill. Its first use costs more than a fast device
// needs for the data: the kernel clears every page, and under a hypervisor the host may first have to find it some
// memory. So several threads do it ahead of the device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/limits.h"

namespace nvme_ops {

// The parts of one call's memory that have no pages. What has some is left alone, and so are the ends that are no whole
// huge pages.
class Population {
public:
  // Before start().
  void add(std::byte* memory, std::uint64_t bytes);
  bool empty() const { return starts_.empty(); }

  // On the process's populating threads, in the order added. Where none can be had the first touch does it, as ever.
  // When the result goes nothing touches the memory any more.
  static std::shared_ptr<const Population> start(std::shared_ptr<Population> population);

  // False while pages of [memory, memory + bytes) are still to come.
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
    std::size_t first;  // of its chunks

    void advise(int advice) const noexcept;
  };

  static constexpr std::size_t kChunk = kHugePage;

  std::vector<Part> parts_;
  std::vector<std::byte*> starts_;  // of all chunks
  std::unique_ptr<std::atomic<bool>[]> done_;
  std::atomic<std::size_t> next_{0};
  mutable std::atomic<bool> behind_{true};  // hardly ahead of the transfers
  std::atomic<std::size_t> busy_{0};
  std::atomic<bool> small_{false};  // some of the pages
  unsigned long generation_ = 0;
};

// Populates memory by several threads and returns when all of it has pages. False: huge ones only; true: who knows.
bool populate_now(std::byte* memory, std::uint64_t bytes);

// For memory that is filled from its start on: populates those of its huge pages that begin in [start, stop), without a
// thread.
void populate_in_part(std::byte* memory, std::uint64_t bytes, std::uint64_t start, std::uint64_t stop);

}  // namespace nvme_ops
