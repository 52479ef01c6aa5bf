// Memory that a read is about to fill.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

// Where it has no pages yet, its first use costs a fault for each 4 KiB, which takes longer than a fast device needs
// for the data. All of it will be written, so huge pages waste nothing. What has pages already is left alone.
void expect_to_fill(std::byte* memory, std::uint64_t bytes) noexcept;

}  // namespace nvme_ops
