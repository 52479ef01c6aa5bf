// Every default and bound, once, next to each other. Environment names stand beside what they override.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

inline constexpr std::uint64_t kBlockSize = 1 << 20;  // DeepNVMe's defaults for the constructor
inline constexpr std::uint64_t kQueueDepth = 128;

inline constexpr std::uint64_t kMaxLanes = 1024;
inline constexpr std::uint64_t kMaxQueueDepth = 4096;      // deeper is accepted; no device queue is deeper
inline constexpr std::uint64_t kMaxTransfer = 0x7ffff000;  // MAX_RW_COUNT: what one read(2) or write(2) moves at most
inline constexpr std::uint64_t kPageSize = 4096;           // the least unit in which we mix direct and cached I/O
inline constexpr std::uint64_t kMaxEdge = 64 << 10;        // st_blksize beyond this is a wish, not a block size
inline constexpr std::size_t kHugePage = 2 << 20;
inline constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

inline constexpr std::size_t kStagingBytes = 64 << 20;  // per handle, shared by its lanes; one huge page each at least
inline constexpr std::size_t kLaneStagingBytes = 20 << 20;  // of one lane: more leaves the processor's cache meanwhile
inline constexpr std::size_t kIdleBytes = kHugePage;        // staging memory the process keeps when nothing moves
inline constexpr std::size_t kPoolBytes = 256 << 20;        // freed tensor memory kept for reuse; NVME_OPS_POOL_BYTES

inline constexpr std::uint64_t kInPlaceBytes = 64 << 10;     // aligned transfers up to this are not worth a copy
inline constexpr std::uint64_t kPreallocateBytes = 1 << 20;  // growth below this is left to the file system
inline constexpr unsigned kPatience = 16;             // consecutive EAGAIN or EINTR of one request before we pause
inline constexpr unsigned kMaxRetries = 1024;         // consecutive EAGAIN or EINTR of one request
inline constexpr unsigned kDescriptorPatience = 256;  // milliseconds until a lack of descriptors is an error
// Bytes below demand in flight: while somebody waits for demand, for a moment after that, and otherwise. What is in
// flight is what a read may find ahead of it; a device needs some of it to be busy.
inline constexpr std::uint64_t kYieldingBytes = 2 << 20;
inline constexpr std::uint64_t kRecentBytes = 8 << 20;
inline constexpr std::uint64_t kDeferableBytes = 32 << 20;
inline constexpr int kDemandMilliseconds = 20;  // for which one request of demand stands
inline constexpr int kRecentMilliseconds = 200;
inline constexpr int kInterruptMilliseconds = 50;  // how often a waiting thread looks for Ctrl-C

static_assert(kStagingBytes % kHugePage == 0 && kLaneStagingBytes % kHugePage == 0);
static_assert(kMaxTransfer % kPageSize == 0);

}  // namespace nvme_ops
