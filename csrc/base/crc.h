// Checksums of data in memory: CRC-32C (Castagnoli) for our own files, CRC-32 (IEEE) for zip files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

enum class Crc : std::uint8_t { Crc32, Crc32c };

// Computes a checksum, continuing from `crc`, the checksum of the preceding data; 0 if there is none.
std::uint32_t checksum(Crc kind, const std::byte* data, std::size_t bytes, std::uint32_t crc = 0);

// The same without special instructions, as a fallback and for comparison.
std::uint32_t plain_checksum(Crc kind, const std::byte* data, std::size_t bytes, std::uint32_t crc = 0);

// Returns the checksum of two runs together, the second `bytes` long, from the checksum of each.
std::uint32_t joined(Crc kind, std::uint32_t first, std::uint32_t second, std::uint64_t bytes);

}  // namespace nvme_ops
