#include "engine/staging.h"

#include "base/error.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {

StagingArea::~StagingArea() {
  trim();
}

StagingBlock StagingArea::allocate(std::size_t bytes) {
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

// First fit. Blocks of one size tile a chunk, so a gap is at most as large as a released block.
StagingBlock StagingArea::allocate_in(Chunk& chunk, int index, std::size_t units) {
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

void StagingArea::release(const StagingBlock& block) {
  Chunk& chunk = chunks_[static_cast<std::size_t>(block.chunk)];
  const std::size_t first = static_cast<std::size_t>(block.data - chunk.memory) / kUnit;
  const std::size_t units = block.bytes / kUnit;
  for (std::size_t unit = first; unit < first + units; ++unit) chunk.used.reset(unit);
  chunk.free_units += units;
}

void StagingArea::trim() {
  while (!chunks_.empty()) {
    BufferPool::instance().release(chunks_.back().memory, kIdleBytes);
    chunks_.pop_back();
    if (!chunks_.empty()) budget_->give_back();
  }
  held_.store(0, std::memory_order_relaxed);
}

}  // namespace nvme_ops
