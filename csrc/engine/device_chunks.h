// Plans how the parts of a call on an accelerator share page-locked chunks: large ones are cut, small ones share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/limits.h"

namespace nvme_ops {

// `bytes` at `position` in a tensor, which belong at `offset` in a file.
struct DevicePart {
  std::size_t tensor;  // index
  std::uint64_t position, bytes, offset;
  std::size_t file;  // index
};

// A part, or the piece of it in one chunk, and its place in that chunk.
struct ChunkPart {
  std::size_t part;    // index
  std::uint64_t from;  // in the part
  std::uint64_t bytes;
  std::uint64_t place;  // in the chunk: misaligned as it is in the file, so that storage moves it in place
  bool first, last;     // of the part
};

class DeviceChunks {
public:
  static constexpr std::size_t kMostFiles = 16;  // per chunk, as they are open at the same time

  // `chunk`: bytes of a chunk, a multiple of the page size.
  DeviceChunks(const std::vector<DevicePart>& parts, std::uint64_t chunk) : parts_(parts), chunk_(chunk) {}

  // Returns the parts of the next chunk; empty at the end.
  std::vector<ChunkPart> next() {
    std::vector<ChunkPart> taken;
    std::uint64_t used = 0;
    std::size_t files = 0;
    while (part_ < parts_.size()) {
      const DevicePart& part = parts_[part_];
      files += taken.empty() || parts_[taken.back().part].file != part.file ? 1 : 0;
      if (files > kMostFiles) break;
      const std::uint64_t offset = part.offset + from_;
      std::uint64_t place = used;
      if (!continues(taken, offset)) place += (offset % kPageSize + kPageSize - place % kPageSize) % kPageSize;
      if (place >= chunk_) break;
      // Cuts at pages of the file: only the ends of the whole part are left to the page cache.
      const std::uint64_t bytes = std::min(part.bytes - from_, chunk_ - place);
      taken.push_back({part_, from_, bytes, place, from_ == 0, from_ + bytes == part.bytes});
      used = place + bytes;
      from_ += bytes;
      if (from_ < part.bytes) break;
      from_ = 0;
      ++part_;
    }
    return taken;
  }

  // Returns whether `part` follows `before` both in the file and in the chunk.
  bool joins(const ChunkPart& before, const ChunkPart& part) const {
    const DevicePart &one = parts_[before.part], &other = parts_[part.part];
    return one.file == other.file && one.offset + before.from + before.bytes == other.offset + part.from &&
           before.place + before.bytes == part.place;
  }

private:
  bool continues(const std::vector<ChunkPart>& taken, std::uint64_t offset) const {
    if (taken.empty()) return false;
    const DevicePart& before = parts_[taken.back().part];
    return before.file == parts_[part_].file && before.offset + taken.back().from + taken.back().bytes == offset;
  }

  const std::vector<DevicePart>& parts_;
  const std::uint64_t chunk_;
  std::size_t part_ = 0;
  std::uint64_t from_ = 0;
};

}  // namespace nvme_ops
