// Keeps cached and direct writes out of the same folio at the same time. The page cache works in folios of up to 2 MiB:
// during a direct write, a cached write next to it can dirty a folio that covers both. The kernel then cannot drop that
// folio when the direct write ends: readers keep getting the old data from it, and the next fsync reports EIO.
// Readahead decides how large folios are, so their size is not known in advance.
#pragma once

#include <cstdint>

namespace nvme_ops {

// Returns the size of the largest folio; folios begin at a multiple of their size.
std::uint64_t folio_bytes();

enum class WriteKind : std::uint8_t { Cached, Direct };

// One write to the file with this inode.
struct GatedWrite {
  WriteKind kind;
  std::uint64_t inode;
  std::uint64_t offset, bytes;
};

// Returns false while writes of the other kind are in flight in the folios where this one begins or ends; ask again
// later. Folios that it covers completely do not matter. Every write that entered must leave. Shared by all threads and
// handles of the process; takes no lock.
bool enter_folios(const GatedWrite& write) noexcept;
void leave_folios(const GatedWrite& write) noexcept;

}  // namespace nvme_ops
