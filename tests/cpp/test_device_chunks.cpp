// DeviceChunks: parts cover the call once, in order, aligned as in the file.
#include "check.h"
#include "engine/device_chunks.h"
#include "support.h"

using namespace nvme_ops;
using support::Random;

namespace {

constexpr std::uint64_t kChunk = 64 << 10;

std::vector<std::vector<ChunkPart>> all(const std::vector<DevicePart>& parts) {
  DeviceChunks chunks(parts, kChunk);
  std::vector<std::vector<ChunkPart>> found;
  for (;;) {
    found.push_back(chunks.next());
    if (found.back().empty()) break;
  }
  found.pop_back();
  return found;
}

}  // namespace

TEST(neighbours_share_a_chunk_without_a_gap) {
  std::vector<DevicePart> parts;
  for (std::size_t i = 0; i < 64; ++i) parts.push_back({i, 0, 1024, 100 + i * 1024, 0});
  const auto chunks = all(parts);
  CHECK_EQUAL(chunks.size(), std::size_t{2});  // the page that the first one begins in
  const DeviceChunks judge(parts, kChunk);
  for (const auto& chunk : chunks) {
    for (std::size_t i = 1; i < chunk.size(); ++i) CHECK(judge.joins(chunk[i - 1], chunk[i]), "one run");
  }
}

TEST(many_small_files_are_not_open_at_once) {
  std::vector<DevicePart> parts;
  for (std::size_t i = 0; i < 100; ++i) parts.push_back({i, 0, 10, 0, i});
  for (const auto& chunk : all(parts)) CHECK(chunk.size() <= DeviceChunks::kMostFiles, "at most 16 files");
}

TEST(whatever_the_parts_are_they_are_covered_once) {
  Random random(check::from_environment("NVME_OPS_TEST_SEED", 1));
  for (int round = 0; round < 500; ++round) {
    std::vector<DevicePart> parts;
    std::uint64_t offset = support::between(random, 0, 10000);
    for (std::uint64_t i = support::between(random, 1, 30); i > 0; --i) {
      const std::uint64_t bytes = support::between(random, 1, support::one_in(random, 4) ? 3 * kChunk : 5000);
      parts.push_back({parts.size(), 0, bytes, offset, support::between(random, 0, 1)});
      offset += bytes + (support::one_in(random, 3) ? support::between(random, 1, 9000) : 0);
    }
    std::size_t part = 0;
    std::uint64_t from = 0;
    for (const auto& chunk : all(parts)) {
      std::uint64_t used = 0;
      for (const ChunkPart& each : chunk) {
        CHECK_EQUAL(each.part, part);
        CHECK_EQUAL(each.from, from);
        CHECK(each.place >= used && each.place + each.bytes <= kChunk, "inside the chunk, beside the others");
        CHECK_EQUAL(each.place % kPageSize, (parts[part].offset + from) % kPageSize);
        CHECK_EQUAL(each.first, from == 0);
        used = each.place + each.bytes;
        from += each.bytes;
        CHECK_EQUAL(each.last, from == parts[part].bytes);
        if (each.last) ++part, from = 0;
      }
    }
    CHECK_EQUAL(part, parts.size());
  }
}
