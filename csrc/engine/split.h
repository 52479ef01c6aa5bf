// Cuts a job into one share for each lane, and each extent into pieces that one request can move. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/io.h"
#include "engine/job.h"

namespace nvme_ops {

// A run of a job's bytes: from byte `skip` of extent `first` up to byte `stop` of extent `last`.
struct Share {
  std::shared_ptr<Job> job;
  std::size_t first, last;
  std::uint64_t skip, stop;
  bool claims = false;

  // Claims the files of this share: where shares of a job meet in a file, it stays open until all have ended.
  void claim_files() noexcept;
  void release_files() noexcept;
};

// Returns at most `lanes` shares of nearly equal size that cover the job once and meet at multiples of kMaxEdge.
std::vector<Share> split(const std::shared_ptr<Job>& job, std::size_t lanes);

enum class Route : std::uint8_t {
  InPlace,   // direct, from or to the caller's memory
  Staged,    // direct, through a staging block
  Buffered,  // through the page cache
};

// The next request of a range: `bytes` wanted at `offset`. A staged read starts `lead` bytes earlier and is `length`
// bytes long, as direct I/O must start and end where the device allows; a staged write is longer where it is padded.
struct Piece {
  Route route;
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint64_t lead;
  std::uint64_t length;
};

// The properties of a file and of memory that decide the route.
struct Layout {
  bool direct;
  std::uint64_t memory_alignment;
  std::uint64_t offset_alignment;
  std::uint64_t edge;
  bool in_place;        // preferred where alignment allows
  bool device = false;  // in place, whatever the alignment
  bool padded = false;  // what follows a write up to the edge may be overwritten
};

// `block`: wanted request size; `staging_block`: the most bytes through staging, a multiple of every alignment.
Piece next_piece(Op op, const Layout& layout, std::uintptr_t memory, std::uint64_t offset, std::uint64_t bytes,
                 std::uint64_t block, std::uint64_t staging_block);

}  // namespace nvme_ops
