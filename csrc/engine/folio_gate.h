// Keeps cached and direct writes out of the same folio at the same time. The page cache works in folios of up to 2 MiB:
// while a direct write is under way, a cached write next to it can dirty a folio that covers both. The kernel then
// cannot drop that folio when the direct write ends: readers keep getting the old data from it, and the next fsync
// reports EIO. Readers decide by their readahead how large folios are, so nobody can know beforehand.
#pragma once

#include <cstdint>

namespace nvme_ops {

// The largest folio; each begins at a multiple of its size.
std::uint64_t folio_bytes();

enum class WriteKind : std::uint8_t { Cached, Direct };

// One write at its place in a file that `inode` stands for.
struct GatedWrite {
  WriteKind kind;
  std::uint64_t inode;
  std::uint64_t offset, bytes;
};

// False while writes of the other kind are under way in the folios where this one begins or ends: to be asked again.
// Those it wholly covers are nobody else's business. Every write that entered must leave. For all threads and handles
// of the process; takes no lock.
bool enter_folios(const GatedWrite& write) noexcept;
void leave_folios(const GatedWrite& write) noexcept;

}  // namespace nvme_ops
