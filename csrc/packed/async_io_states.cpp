#include "packed/async_io_states.h"

#include <algorithm>
#include <cstring>

#include "packed/async_io_versions.h"

#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3,no-trapping-math")
#endif

namespace nvme_ops {
namespace {

constexpr std::uint32_t kInfinity = 0x7f800000;

NVME_INLINE void quantize_block(const StateMap& map, const float* values, std::size_t count, std::uint8_t* numbers,
                                float* scale) {
  std::int32_t most = 0;  // as integers, NaN is the largest
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, bits<std::int32_t>(values[i]) & 0x7fffffff);
  const float divisor = bits<float>(most);
  *scale = divisor;
  if (most == 0 || most >= static_cast<std::int32_t>(kInfinity)) {
    std::memset(numbers, map.number[0], count);
    return;
  }
  float shares[kStatesOfBlock];
  for (std::size_t i = 0; i < count; ++i) shares[i] = values[i] / divisor;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t least = map.number[bits<std::uint32_t>(shares[i]) >> 16];
    numbers[i] = static_cast<std::uint8_t>(least + (shares[i] > map.bounds[least] ? 1 : 0));
  }
}

}  // namespace

NVME_VERSIONS void quantize_states(const StateMap& map, const float* values, std::size_t count, std::uint8_t* numbers,
                                   float* scales) {
  for (std::size_t at = 0; at < count; at += kStatesOfBlock) {
    quantize_block(map, values + at, std::min(kStatesOfBlock, count - at), numbers + at, scales++);
  }
}

NVME_VERSIONS void expand_states(const StateMap& map, const std::uint8_t* numbers, const float* scales,
                                 std::size_t count, float* out) {
  for (std::size_t at = 0; at < count; at += kStatesOfBlock) {
    const float scale = *scales++;
    const std::size_t end = std::min(at + kStatesOfBlock, count);
    for (std::size_t i = at; i < end; ++i) out[i] = map.values[numbers[i]] * scale;
  }
}

NVME_VERSIONS void round_states(const float* values, std::size_t count, std::uint32_t key, std::uint32_t first,
                                std::uint16_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t random = (first + static_cast<std::uint32_t>(i)) * 0x9e3779b9U + key;  // then lowbias32
    random = (random ^ (random >> 16)) * 0x7feb352dU;
    random = (random ^ (random >> 15)) * 0x846ca68bU;
    const auto word = bits<std::uint32_t>(values[i]);
    const bool is_finite = (word & kInfinity) != kInfinity;  // an infinity stays one, and NaN is made none
    const std::uint32_t rest = (word & 0x7fffffff) > kInfinity ? 0x400000U : 0U;
    out[i] = static_cast<std::uint16_t>((is_finite ? word + (random >> 16) : word | rest) >> 16);
  }
}

}  // namespace nvme_ops
#if !defined(__clang__)
#pragma GCC pop_options
#endif
