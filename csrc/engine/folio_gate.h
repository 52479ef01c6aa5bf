// Keeps cached and direct writes out of the same folio at the same time. A cached write beside a direct one can dirty a
// folio that covers both: readers then keep getting the old data from it, and the next fsync reports EIO. Readahead
// decides how large folios are, up to 2 MiB.
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

// Returns false while writes of the other kind are in flight in the folios where this one begins or ends. Every write
// that entered must leave. Shared by all threads and handles of the process; takes no lock.
bool enter_folios(const GatedWrite& write) noexcept;
void leave_folios(const GatedWrite& write) noexcept;

}  // namespace nvme_ops
