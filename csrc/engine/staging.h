// The bounded memory through which misaligned and pageable data pass: huge pages, cut into blocks as requests need them.
#pragma once

#include <bitset>
#include <cstddef>
#include <functional>
#include <vector>

#include "base/limits.h"

namespace nvme_ops {

struct StagingBlock {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  int chunk = -1;  // which huge page it lies in

  explicit operator bool() const { return data != nullptr; }
};

class StagingArea {
 public:
  static constexpr std::size_t kChunk = kHugePage;  // no block is larger

  explicit StagingArea(std::size_t most_bytes);
  StagingArea(const StagingArea&) = delete;
  StagingArea& operator=(const StagingArea&) = delete;
  ~StagingArea();

  std::size_t most_chunks() const { return most_chunks_; }
  std::size_t held_bytes() const { return chunks_.size() * kChunk; }
  std::byte* chunk(int index) const { return chunks_[static_cast<std::size_t>(index)].memory; }

  // A block aligned to a page, or an empty one when all the memory allowed is in use. `on_new_chunk` hears of every huge
  // page taken, `on_trim` of every one given back, so that a queue can register them.
  StagingBlock allocate(std::size_t bytes, const std::function<void(int)>& on_new_chunk);
  void release(const StagingBlock& block);

  // With nothing in use: gives back all but one huge page.
  void trim(const std::function<void(int)>& on_trim);

  // Leaves the memory alone for ever: the kernel may still write to it.
  void forget() { chunks_.clear(); }

 private:
  static constexpr std::size_t kUnit = kPageSize;
  static constexpr std::size_t kUnits = kChunk / kUnit;

  struct Chunk {
    std::byte* memory;
    std::bitset<kUnits> used;
    std::size_t free_units;
  };

  static StagingBlock allocate_in(Chunk& chunk, int index, std::size_t units);

  const std::size_t most_chunks_;
  std::vector<Chunk> chunks_;
};

}  // namespace nvme_ops
