#include "engine/split.h"

#include <algorithm>
#include <utility>

#include "base/limits.h"

namespace nvme_ops {
namespace {

std::uint64_t down(std::uint64_t value, std::uint64_t alignment) {
  return value - value % alignment;
}

std::uint64_t up(std::uint64_t value, std::uint64_t alignment) {
  return down(value + alignment - 1, alignment);
}

// Returns the largest multiple of `alignment` not above `block`, but at least one.
std::uint64_t whole(std::uint64_t block, std::uint64_t alignment) {
  return std::max(alignment, down(std::min(block, kMaxTransfer), alignment));
}

Piece plain(Route route, std::uint64_t offset, std::uint64_t bytes) {
  return {route, offset, bytes, 0, bytes};
}

// Reads need only sectors: what surrounds the wanted bytes is read with them and dropped. Large reads are cut at pages
// of the file: what is below a device with 512-byte sectors, a file or flash, works in larger units.
Piece next_read(const Layout& layout, std::uintptr_t memory, std::uint64_t offset, std::uint64_t bytes,
                std::uint64_t block, std::uint64_t staging_block) {
  const std::uint64_t sector = layout.offset_alignment;
  const bool large = bytes > kInPlaceBytes && block >= kPageSize;
  const std::uint64_t unit = large ? std::max(sector, kPageSize) : sector;
  const std::uint64_t lead = offset % unit;
  const std::uint64_t to_unit = (unit - lead) % unit;
  const bool body_in_place =
      layout.in_place && (memory + to_unit) % layout.memory_alignment == 0 && bytes >= to_unit + unit;
  if (body_in_place && lead == 0)
    return plain(Route::InPlace, offset, std::min(down(bytes, sector), whole(block, unit)));

  const std::uint64_t most = whole(std::min(block, staging_block), unit) - lead;
  const std::uint64_t wanted = std::min(bytes, body_in_place ? to_unit : most);
  return {Route::Staged, offset, wanted, lead, up(lead + wanted, sector)};
}

// Writes are direct in whole edges; what is left at both ends goes through the page cache, which works in whole pages.
// Where a write may be padded its end is direct too: nobody waits for the page cache to be written, nor sees that fail.
Piece next_write(const Layout& layout, std::uintptr_t memory, std::uint64_t offset, std::uint64_t bytes,
                 std::uint64_t block, std::uint64_t staging_block) {
  const std::uint64_t edge = layout.edge;
  if (offset % edge != 0) return plain(Route::Buffered, offset, std::min(bytes, edge - offset % edge));
  const std::uint64_t body = down(bytes, edge);
  if (body == 0 && !layout.padded) return plain(Route::Buffered, offset, bytes);
  if (body != 0 && layout.in_place && memory % layout.memory_alignment == 0) {
    return plain(Route::InPlace, offset, std::min(body, whole(block, edge)));
  }
  const std::uint64_t most = whole(std::min(block, staging_block), edge);
  const std::uint64_t wanted = std::min(layout.padded ? bytes : body, most);
  return {Route::Staged, offset, wanted, 0, up(wanted, edge)};
}

}  // namespace

void Share::claim_files() noexcept {
  claims = true;
  for (const std::size_t extent : {first, last}) job->extents()[extent].file->claim();
}

void Share::release_files() noexcept {
  if (!std::exchange(claims, false)) return;
  for (const std::size_t extent : {first, last}) {
    SharedFile& file = *job->extents()[extent].file;
    job->note_closed(file, file.end_claim());
  }
}

std::vector<Share> split(const std::shared_ptr<Job>& job, std::size_t lanes) {
  const std::vector<Extent>& extents = job->extents();
  const std::uint64_t total = job->bytes();
  const std::uint64_t target = total / lanes + (total % lanes != 0);

  std::vector<Share> shares;
  Share share{job, 0, 0, 0, 0};
  std::uint64_t taken = 0;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const Extent& extent = extents[i];
    std::uint64_t position = 0;
    while (shares.size() + 1 < lanes && taken + (extent.bytes - position) > target) {
      const std::uint64_t wanted = extent.offset + position + (target - taken);
      const std::uint64_t cut = up(wanted, kMaxEdge) - extent.offset;
      if (cut >= extent.bytes) break;
      share.last = i;
      share.stop = cut;
      shares.push_back(share);
      share = {job, i, i, cut, 0};
      position = cut;
      taken = 0;
    }
    taken += extent.bytes - position;
    share.last = i;
    share.stop = extent.bytes;
    if (taken >= target && shares.size() + 1 < lanes && i + 1 < extents.size()) {
      shares.push_back(share);
      share = {job, i + 1, i + 1, 0, 0};
      taken = 0;
    }
  }
  shares.push_back(share);
  return shares;
}

Piece next_piece(Op op, const Layout& layout, std::uintptr_t memory, std::uint64_t offset, std::uint64_t bytes,
                 std::uint64_t block, std::uint64_t staging_block) {
  if (layout.device)
    return plain(Route::InPlace, offset, std::min(bytes, whole(block, kPageSize) - offset % kPageSize));
  if (!layout.direct) return plain(Route::Buffered, offset, std::min({bytes, block, kMaxTransfer}));
  return (op == Op::Read ? next_read : next_write)(layout, memory, offset, bytes, block, staging_block);
}

}  // namespace nvme_ops
