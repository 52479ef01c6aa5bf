// Bounded memory through which misaligned and pageable data pass: huge pages, cut into blocks as requests need them.
#pragma once

#include <atomic>
#include <bitset>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/limits.h"

namespace nvme_ops {

struct StagingBlock {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  int chunk = -1;  // which huge page it lies in

  explicit operator bool() const { return data != nullptr; }
};

// The memory that the lanes of one handle may take together, beyond the one huge page that each can always have.
class StagingBudget {
public:
  explicit StagingBudget(std::size_t chunks) : left_(static_cast<std::ptrdiff_t>(chunks)) {}
  bool take() {
    if (left_.fetch_sub(1) > 0) return true;
    left_.fetch_add(1);
    return false;
  }
  void give_back() { left_.fetch_add(1); }

private:
  std::atomic<std::ptrdiff_t> left_;
};

class StagingArea {
public:
  static constexpr std::size_t kChunk = kHugePage;  // no block is larger
  static constexpr std::size_t kMostChunks = kLaneStagingBytes / kChunk;

  explicit StagingArea(std::shared_ptr<StagingBudget> budget) : budget_(std::move(budget)) {
    chunks_.reserve(kMostChunks);
  }
  StagingArea(const StagingArea&) = delete;
  StagingArea& operator=(const StagingArea&) = delete;
  ~StagingArea();

  std::size_t held_bytes() const { return held_.load(std::memory_order_relaxed); }  // from any thread
  std::byte* chunk(int index) const { return chunks_[static_cast<std::size_t>(index)].memory; }

  // Returns a block aligned to a page, or an empty one while all memory is in use. Throws if there is no memory at all.
  StagingBlock allocate(std::size_t bytes);
  void release(const StagingBlock& block);

  // Releases all memory. Call when no block is in use.
  void trim();

private:
  static constexpr std::size_t kUnit = kPageSize;
  static constexpr std::size_t kUnits = kChunk / kUnit;

  struct Chunk {
    std::byte* memory;
    std::bitset<kUnits> used;
    std::size_t free_units;
  };

  static StagingBlock allocate_in(Chunk& chunk, int index, std::size_t units);

  const std::shared_ptr<StagingBudget> budget_;
  std::vector<Chunk> chunks_;
  std::atomic<std::size_t> held_{0};
};

}  // namespace nvme_ops
