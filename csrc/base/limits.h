// Every default and bound, defined once. Environment variables stand beside what they override.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

inline constexpr std::uint64_t kBlockSize = 1 << 20;  // DeepNVMe's default for the constructor
inline constexpr std::uint64_t kMaxLanes = 1024;
inline constexpr std::uint64_t kAutomaticLanes = 4;        // that many for cached reads into an accelerator
inline constexpr std::uint64_t kMaxQueueDepth = 4096;      // deeper is accepted; no device queue is deeper
inline constexpr std::uint64_t kMaxTransfer = 0x7ffff000;  // MAX_RW_COUNT: the most that one read(2) or write(2) moves
inline constexpr std::uint64_t kPageSize = 4096;           // the smallest unit in which direct and cached I/O are mixed
inline constexpr std::uint64_t kMaxEdge = 64 << 10;        // a larger st_blksize is a preference, not a block size
inline constexpr std::size_t kHugePage = 2 << 20;
inline constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

inline constexpr std::size_t kStagingBytes = 64 << 20;      // per handle; each lane gets at least one huge page
inline constexpr std::size_t kLaneStagingBytes = 16 << 20;  // per lane: more would not stay in the processor's cache
inline constexpr std::size_t kIdleBytes = kHugePage;        // staging memory that the process keeps while idle
inline constexpr std::size_t kPoolBytes = 256 << 20;        // freed tensor memory kept for reuse; NVME_OPS_POOL_BYTES

inline constexpr std::uint64_t kInPlaceBytes = 64 << 10;  // aligned transfers up to this go in place in small pages
inline constexpr std::uint64_t kDividedBytes = 64 << 20;  // cached reads from here on: two lanes, if that is automatic
inline constexpr std::uint64_t kLaneBytes = 1 << 20;      // the least for each lane, if an accelerator gets them
inline constexpr unsigned kReadsInARow = 3;               // small ones: the third goes through the page cache
inline constexpr std::uint64_t kPreallocateBytes = 1 << 20;  // smaller growth is not preallocated
inline constexpr unsigned kPatience = 16;             // consecutive refusals, as EAGAIN, of one request before a pause
inline constexpr unsigned kMaxRetries = 1024;         // consecutive refusals of one request
inline constexpr unsigned kDescriptorPatience = 256;  // milliseconds until running out of descriptors is an error
// The most bytes below Demand in flight: while there is demand, for a moment after it, and otherwise. A demand read has
// to wait behind what is in flight; a device needs some of it to stay busy.
inline constexpr std::uint64_t kYieldingBytes = 2 << 20;
inline constexpr std::uint64_t kRecentBytes = 8 << 20;
inline constexpr std::uint64_t kDeferableBytes = 32 << 20;
inline constexpr int kDemandMilliseconds = 20;  // for which one Demand request counts as demand
inline constexpr int kRecentMilliseconds = 200;
inline constexpr int kInterruptMilliseconds = 50;  // how often a waiting thread looks for Ctrl-C

static_assert(kStagingBytes % kHugePage == 0 && kLaneStagingBytes % kHugePage == 0);
static_assert(kMaxTransfer % kPageSize == 0);

}  // namespace nvme_ops
