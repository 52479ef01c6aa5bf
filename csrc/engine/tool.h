// How one job is moved, where that may differ from job to job.
#pragma once

#include <cstdint>

#include "engine/file.h"

namespace nvme_ops {

// 0: as the engine's options say.
struct Tool {
  std::uint64_t block_size = 0;
  std::uint64_t queue_depth = 0;  // requests in flight, for each lane
  std::uint64_t lanes = 0;        // among which it is divided: at most those of the engine
  bool in_place = false;          // without staging memory, wherever alignment allows
  bool bounce = false;            // accelerator tensors through page-locked memory, even if cuFile could move them
  Cache cache = Cache::Auto;

  friend bool operator==(const Tool& one, const Tool& other) {
    return one.block_size == other.block_size && one.queue_depth == other.queue_depth && one.lanes == other.lanes &&
           one.in_place == other.in_place && one.bounce == other.bounce && one.cache == other.cache;
  }
};

}  // namespace nvme_ops
