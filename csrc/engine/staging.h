// Bounded memory through which misaligned and pageable data pass: huge pages, cut into blocks as requests need them.
#pragma once

#include <atomic>
#include <bitset>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/limits.h"
#include "engine/buffer_pool.h"

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
  ~StagingArea() { trim(); }

  std::size_t held_bytes() const { return held_.load(std::memory_order_relaxed); }  // from any thread
  std::byte* chunk(int index) const { return chunks_[static_cast<std::size_t>(index)].memory; }

  // Returns a block aligned to a page, or an empty one while all memory is in use. Throws if there is no memory at all.
  StagingBlock allocate(std::size_t bytes) {
    NVME_INVARIANT(bytes > 0 && bytes <= kChunk);
    const std::size_t units = (bytes + kUnit - 1) / kUnit;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      if (const StagingBlock block = allocate_in(chunks_[i], static_cast<int>(i), units)) return block;
    }
    if (!chunks_.empty() && (chunks_.size() == kMostChunks || !budget_->take())) return {};
    try {
      chunks_.push_back({BufferPool::instance().allocate(kChunk), {}, kUnits});
    } catch (...) {
      if (chunks_.empty()) throw;
      budget_->give_back();  // the chunks there are do the work
      return {};
    }
    held_.store(chunks_.size() * kChunk, std::memory_order_relaxed);
    return allocate_in(chunks_.back(), static_cast<int>(chunks_.size()) - 1, units);
  }
  void release(const StagingBlock& block) {
    Chunk& chunk = chunks_[static_cast<std::size_t>(block.chunk)];
    const std::size_t first = static_cast<std::size_t>(block.data - chunk.memory) / kUnit;
    const std::size_t units = block.bytes / kUnit;
    for (std::size_t unit = first; unit < first + units; ++unit) chunk.used.reset(unit);
    chunk.free_units += units;
  }

  // Releases all memory. Call when no block is in use.
  void trim() {
    while (!chunks_.empty()) {
      BufferPool::instance().release(chunks_.back().memory, kIdleBytes);
      chunks_.pop_back();
      if (!chunks_.empty()) budget_->give_back();
    }
    held_.store(0, std::memory_order_relaxed);
  }

private:
  static constexpr std::size_t kUnit = kPageSize;
  static constexpr std::size_t kUnits = kChunk / kUnit;

  struct Chunk {
    std::byte* memory;
    std::bitset<kUnits> used;
    std::size_t free_units;
  };

  // First fit. Blocks of one size tile a chunk, so a gap is at most as large as a released block.
  static StagingBlock allocate_in(Chunk& chunk, int index, std::size_t units) {
    if (chunk.free_units < units) return {};
    std::size_t run = 0;
    for (std::size_t unit = 0; unit < kUnits; ++unit) {
      run = chunk.used[unit] ? 0 : run + 1;
      if (run < units) continue;
      const std::size_t first = unit + 1 - units;
      for (std::size_t used = first; used <= unit; ++used) chunk.used.set(used);
      chunk.free_units -= units;
      return {chunk.memory + first * kUnit, units * kUnit, index};
    }
    return {};
  }

  const std::shared_ptr<StagingBudget> budget_;
  std::vector<Chunk> chunks_;
  std::atomic<std::size_t> held_{0};
};

}  // namespace nvme_ops
