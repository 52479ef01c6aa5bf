#include "engine/staging.h"

#include <algorithm>

#include "base/error.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {

StagingArea::StagingArea(std::size_t most_bytes) : most_chunks_(std::max<std::size_t>(1, most_bytes / kChunk)) {}

StagingArea::~StagingArea() {
  for (const Chunk& chunk : chunks_) BufferPool::instance().release(chunk.memory, false);
}

StagingBlock StagingArea::allocate(std::size_t bytes, const std::function<void(int)>& on_new_chunk) {
  NVME_INVARIANT(bytes > 0 && bytes <= kChunk);
  const std::size_t units = (bytes + kUnit - 1) / kUnit;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (const StagingBlock block = allocate_in(chunks_[i], static_cast<int>(i), units)) return block;
  }
  if (chunks_.size() == most_chunks_) return {};
  chunks_.push_back({BufferPool::instance().allocate(kChunk), {}, kUnits});
  const int index = static_cast<int>(chunks_.size()) - 1;
  on_new_chunk(index);
  return allocate_in(chunks_.back(), index, units);
}

// First fit. Blocks of one size tile the chunk; a gap can only be as large as a block that was released.
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

void StagingArea::trim(const std::function<void(int)>& on_trim) {
  while (chunks_.size() > 1) {
    NVME_INVARIANT(chunks_.back().free_units == kUnits);
    on_trim(static_cast<int>(chunks_.size()) - 1);
    BufferPool::instance().release(chunks_.back().memory, false);
    chunks_.pop_back();
  }
}

}  // namespace nvme_ops
