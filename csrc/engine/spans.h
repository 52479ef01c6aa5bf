// Memory in several parts for one run of a file: gathered by a write, scattered by a read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/io.h"
#include "engine/copy.h"

namespace nvme_ops {

struct Span {
  std::byte* memory;
  std::uint64_t bytes;
};

class Spans {
public:
  void add(Span span) {
    if (span.bytes == 0) return;
    starts_.push_back(bytes_);
    spans_.push_back(span);
    bytes_ += span.bytes;
  }
  std::uint64_t bytes() const { return bytes_; }
  std::size_t count() const { return spans_.size(); }

  // Returns the memory at `position`: at most `bytes`, and at most to the end of its part.
  Span at(std::uint64_t position, std::uint64_t bytes) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), position);
    const auto index = static_cast<std::size_t>(after - starts_.begin()) - 1;
    const Span& span = spans_[index];
    const std::uint64_t skip = position - starts_[index];
    return {span.memory + skip, std::min(bytes, span.bytes - skip)};
  }

  // Copies between a block and the parts from `position` on: out of them for Op::Write, into them for Op::Read.
  void copy(Op op, std::byte* block, std::uint64_t position, std::uint64_t bytes) const {
    for (const std::uint64_t end = position + bytes; position < end;) {
      const Span part = at(position, end - position);
      op == Op::Write ? copy_bytes(block, part.memory, part.bytes) : copy_bytes(part.memory, block, part.bytes);
      block += part.bytes;
      position += part.bytes;
    }
  }

private:
  std::vector<Span> spans_;
  std::vector<std::uint64_t> starts_;
  std::uint64_t bytes_ = 0;
};

}  // namespace nvme_ops
