// Keeps the states of optimizers in 8 or 16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

// Numbers of 8 bits that stand for 256 values, in ascending order, times the scale of a block.
inline constexpr std::size_t kStatesOfBlock = 256;
inline constexpr std::size_t kBeginnings = 1 << 16;
struct StateMap {
  const float* values;
  const float* bounds;         // between neighbours; the last is infinity
  const std::uint8_t* number;  // of the least float that begins with these 16 bits; another may have the next number
};

// Blocks whose scale, their largest absolute value, is 0, infinite or NaN get the number of zero throughout.
void quantize_states(const StateMap& map, const float* values, std::size_t count, std::uint8_t* numbers, float* scales);
void expand_states(const StateMap& map, const std::uint8_t* numbers, const float* scales, std::size_t count,
                   float* out);

// Rounds to bfloat16, up with the probability that keeps the mean, by random numbers of which `key` begins a sequence
// and `first` is the place of the first one.
void round_states(const float* values, std::size_t count, std::uint32_t key, std::uint32_t first, std::uint16_t* out);

}  // namespace nvme_ops
