// Products with packed matrices, whose values are made in registers, or a few at a time, and never stored.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "packed/async_io_packed.h"
#include "packed/async_io_versions.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif

namespace nvme_ops {
namespace {

constexpr std::size_t kPiece = 1024;  // values made at a time
constexpr std::size_t kAtOnce = 16;   // numbers of 4 bits that are multiplied together
constexpr std::size_t kMostGroups = 2048;

#if defined(__x86_64__)
#define NVME_AVX2 __attribute__((target("avx2,fma,f16c")))

// What sixteen numbers stand for: of those of 4 bits the even ones first, of others as they follow each other.
template <Numbers kind>
NVME_AVX2 inline void sixteen(const std::uint8_t* from, __m256 low_values, __m256 high_values, __m256* out) {
  if constexpr (kind <= Numbers::HighFirst) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const __m256i high = _mm256_srli_epi32(bytes, 4);
    // three bits select one of eight values, the fourth one of the halves of the table
    out[kind == Numbers::HighFirst] =
        _mm256_blendv_ps(_mm256_permutevar8x32_ps(low_values, bytes), _mm256_permutevar8x32_ps(high_values, bytes),
                         _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 28)));
    out[kind == Numbers::LowFirst] =
        _mm256_blendv_ps(_mm256_permutevar8x32_ps(low_values, high), _mm256_permutevar8x32_ps(high_values, high),
                         _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 24)));
    return;
  }
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (kind == Numbers::E4m3 || kind == Numbers::E5m2) {  // by way of float16, also below the least exponent
    const __m256i upper = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), sign = _mm256_set1_epi16(-0x8000);
    __m256i halves = upper;
    if constexpr (kind == Numbers::E4m3) {
      const __m256i rest = _mm256_srli_epi16(_mm256_andnot_si256(sign, upper), 1);
      const __m256i nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7f << 7));
      halves = _mm256_or_si256(_mm256_or_si256(rest, _mm256_and_si256(upper, sign)), nan);
    }
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    if constexpr (kind == Numbers::E4m3) {  // whose exponents begin higher than those of float16
      for (int i = 0; i < 2; ++i) out[i] = _mm256_mul_ps(out[i], _mm256_set1_ps(0x1p8F));
    }
  } else {
    const __m128i values = kind == Numbers::Int8 ? bytes : _mm_xor_si128(bytes, _mm_set1_epi8(-128));
    out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values));
    out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(values, 8)));
  }
}

NVME_AVX2 inline float sum_of(__m256 sums) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// Multiplies one row, group by group.
template <Numbers kind, std::size_t tokens>
NVME_AVX2 void multiply_row(const PackedMatrix& matrix, std::size_t row, const float* scales, const float* zeros,
                            const float* inputs, float* out) {
  constexpr std::size_t kBytes = kind <= Numbers::HighFirst ? kAtOnce / 2 : kAtOnce;
  const std::uint8_t* numbers = matrix.numbers + row * (matrix.columns / kAtOnce * kBytes);
  __m256 low_values = _mm256_setzero_ps(), high_values = low_values, sums[tokens], values[2];
  if (matrix.table != nullptr) {
    low_values = _mm256_loadu_ps(matrix.table);
    high_values = _mm256_loadu_ps(matrix.table + 8);
  }
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (std::size_t at = 0, group = 0; at < matrix.columns; ++group) {
    __m256 of_group[tokens];
    for (auto& sum : of_group) sum = _mm256_setzero_ps();
    const __m256 zero = _mm256_set1_ps(zeros == nullptr ? 0 : zeros[group]);
    for (const std::size_t end = at + matrix.group; at < end; at += kAtOnce, numbers += kBytes) {
      sixteen<kind>(numbers, low_values, high_values, values);
      for (int half = 0; half < 2; ++half) {
        const __m256 value = _mm256_sub_ps(values[half], zero);
        for (std::size_t token = 0; token < tokens; ++token) {
          const __m256 input = _mm256_loadu_ps(inputs + token * matrix.columns + at + 8 * half);
          of_group[token] = _mm256_fmadd_ps(value, input, of_group[token]);
        }
      }
    }
    const __m256 scale = _mm256_set1_ps(scales[group]);
    for (std::size_t token = 0; token < tokens; ++token) {
      sums[token] = _mm256_fmadd_ps(of_group[token], scale, sums[token]);
    }
  }
  for (std::size_t token = 0; token < tokens; ++token) out[token * matrix.rows + row] = sum_of(sums[token]);
}

// The same for codes of 4 bits that bfloat16 represents, without zero points: their two bytes are selected apart.
template <std::size_t bytes, std::size_t tokens>
NVME_AVX2 void multiply_short_row(const PackedMatrix& matrix, std::size_t row, const float* scales, const float*,
                                  const float* inputs, float* out) {
  const std::uint8_t* numbers = matrix.numbers + row * (matrix.columns / 2);
  std::uint8_t halves[2][16];
  for (int i = 0; i < 16; ++i) {
    const auto word = bits<std::uint32_t>(matrix.table[i]);
    halves[0][i] = static_cast<std::uint8_t>(word >> 16), halves[1][i] = static_cast<std::uint8_t>(word >> 24);
  }
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves[0])));
  const __m256i upper = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves[1])));
  // the even numbers in one half, the odd ones in the other
  const int first = matrix.numbers_as == Numbers::LowFirst ? 0 : 4, second = 4 - first;
  const __m256i shifts = _mm256_setr_epi32(first, first, first, first, second, second, second, second);
  const __m256i mask = _mm256_set1_epi8(15), none = _mm256_setzero_si256();
  __m256 sums[tokens];
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (std::size_t at = 0, group = 0; at < matrix.columns; ++group) {
    __m256 of_group[tokens];
    for (auto& sum : of_group) sum = _mm256_setzero_ps();
    for (const std::size_t end = at + matrix.group; at < end; at += 2 * bytes, numbers += bytes) {
      __m256i both;
      if constexpr (bytes == 16) {
        both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
      } else {
        both = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers)));
      }
      const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(both, shifts), mask);
      const __m256i low = _mm256_shuffle_epi8(lower, codes), high = _mm256_shuffle_epi8(upper, codes);
      for (std::size_t half = 0; half < bytes / 8; ++half) {
        const __m256i words = half == 0 ? _mm256_unpacklo_epi8(low, high) : _mm256_unpackhi_epi8(low, high);
        const __m256 values[2] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, words)),
                                  _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, words))};
        for (int i = 0; i < 2; ++i) {
          for (std::size_t token = 0; token < tokens; ++token) {
            const __m256 input = _mm256_loadu_ps(inputs + token * matrix.columns + at + 16 * half + 8 * i);
            of_group[token] = _mm256_fmadd_ps(values[i], input, of_group[token]);
          }
        }
      }
    }
    const __m256 scale = _mm256_set1_ps(scales[group]);
    for (std::size_t token = 0; token < tokens; ++token) {
      sums[token] = _mm256_fmadd_ps(of_group[token], scale, sums[token]);
    }
  }
  for (std::size_t token = 0; token < tokens; ++token) out[token * matrix.rows + row] = sum_of(sums[token]);
}

using Row = decltype(&multiply_row<Numbers::Int8, 1>);
template <Numbers kind>
Row row_of(std::size_t tokens) {
  constexpr Row kRows[] = {multiply_row<kind, 1>, multiply_row<kind, 2>, multiply_row<kind, 3>, multiply_row<kind, 4>};
  return kRows[tokens - 1];
}
template <std::size_t bytes>
Row short_row_of(std::size_t tokens) {
  constexpr Row kRows[] = {multiply_short_row<bytes, 1>, multiply_short_row<bytes, 2>, multiply_short_row<bytes, 3>,
                           multiply_short_row<bytes, 4>};
  return kRows[tokens - 1];
}

// Whether the codes are those of multiply_short_row.
bool is_short(const PackedMatrix& matrix) {
  if (matrix.numbers_as > Numbers::HighFirst || matrix.zeros != nullptr || matrix.packed_zeros != nullptr) return false;
  return std::all_of(matrix.table, matrix.table + 16,
                     [](float value) { return (bits<std::uint32_t>(value) & 0xffff) == 0; });
}

bool has_instructions() {
  static const bool has = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;  // f16c is older
  return has;
}
#endif

// Eight sums side by side, so that the compiler makes a vector of them.
NVME_VERSIONS float dot(const float* left, const float* right, std::size_t count) {
  float sums[8]{}, sum = 0;
  for (; count >= 8; count -= 8, left += 8, right += 8) {
    for (int i = 0; i < 8; ++i) sums[i] += left[i] * right[i];
  }
  for (std::size_t i = 0; i < count; ++i) sum += left[i] * right[i];
  for (const float one : sums) sum += one;
  return sum;
}

#if defined(__x86_64__)
// How a row is multiplied by vector instructions; null if it is not.
Row row_of(const PackedMatrix& matrix, std::size_t tokens) {
  const bool whole = matrix.group % kAtOnce == 0 && matrix.columns % matrix.group == 0;
  if (!whole || matrix.groups() > kMostGroups || !has_instructions()) return nullptr;
  if (is_short(matrix)) return matrix.group % 32 == 0 ? short_row_of<16>(tokens) : short_row_of<8>(tokens);
  switch (matrix.numbers_as) {
    case Numbers::LowFirst:
      return row_of<Numbers::LowFirst>(tokens);
    case Numbers::HighFirst:
      return row_of<Numbers::HighFirst>(tokens);
    case Numbers::Int8:
      return row_of<Numbers::Int8>(tokens);
    case Numbers::Biased8:
      return row_of<Numbers::Biased8>(tokens);
    case Numbers::E4m3:
      return row_of<Numbers::E4m3>(tokens);
    case Numbers::E5m2:
      return row_of<Numbers::E5m2>(tokens);
    default:
      return nullptr;
  }
}
#endif

using EightWords = std::uint32_t __attribute__((vector_size(32)));
using EightSums = float __attribute__((vector_size(32)));

// Multiplies columns [begin, begin + 8 * vectors) of words with inputs for the rows.
template <Numbers kind, std::size_t tokens, std::size_t vectors>
NVME_INLINE void multiply_columns_at(const PackedMatrix& matrix, const std::uint32_t* order, const float* inputs,
                                     std::size_t begin, float* out) {
  constexpr std::size_t kColumns = 8 * vectors;
  using Ints = std::int32_t __attribute__((vector_size(32)));
  const EightWords even_first{0, 16, 4, 20, 8, 24, 12, 28};
  constexpr std::size_t of_word = kind == Numbers::EvenFirst ? 1 : kind == Numbers::Stacked4 ? 8 : 4;
  constexpr std::uint32_t bits = kind == Numbers::Stacked8 ? 8 : 4, mask = (1U << bits) - 1;
  EightSums sums[tokens][vectors]{}, of_group[tokens][vectors], zeros[vectors];
  EightWords words[vectors];
  const auto read = [&](std::size_t row) NVME_INLINED {
    if constexpr (of_word == 1) {
      const std::uint8_t* const from = matrix.numbers + (row * matrix.columns + begin) / 2;
      for (std::size_t i = 0; i < vectors; ++i) {
        std::uint32_t word;
        std::memcpy(&word, from + 4 * i, sizeof word);
        words[i] = (EightWords{} + word) >> even_first;
      }
    } else {
      std::memcpy(words, matrix.numbers + (row / of_word * matrix.columns + begin) * 4, sizeof words);
    }
  };
  const auto add = [&](std::size_t row, std::size_t of_words) NVME_INLINED {
    for (std::size_t i = 0; i < vectors; ++i) {
      const auto integers = (Ints)((words[i] >> static_cast<std::uint32_t>(bits * of_words)) & mask);
      const auto number = __builtin_convertvector(integers, EightSums) - zeros[i];
      for (std::size_t token = 0; token < tokens; ++token) {
        of_group[token][i] += number * inputs[token * matrix.rows + row];
      }
    }
  };
  for (std::size_t at = 0; at < matrix.rows;) {
    const std::size_t group = matrix.scale_row(order == nullptr ? at : order[at]);
    float scales[kColumns], made[kColumns];
    read_scales(matrix, group * matrix.columns + begin, kColumns, scales);
    std::memcpy(zeros, zeros_of(matrix, group * matrix.columns + begin, kColumns, made), sizeof zeros);
    std::memset(of_group, 0, sizeof of_group);
    if (order == nullptr) {
      for (const std::size_t end = std::min(at + matrix.rows_of_scale, matrix.rows); at < end; at += of_word) {
        read(at);
        for (std::size_t k = 0; k < of_word; ++k) add(at + k, k);
      }
    } else {
      for (; at < matrix.rows && matrix.scale_row(order[at]) == group; ++at) {
        read(order[at]);
        add(order[at], order[at] % of_word);
      }
    }
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t i = 0; i < vectors; ++i) {
        EightSums scale;
        std::memcpy(&scale, scales + 8 * i, sizeof scale);
        sums[token][i] += of_group[token][i] * scale;
      }
    }
  }
  for (std::size_t token = 0; token < tokens; ++token) {
    std::memcpy(out + token * matrix.columns + begin, sums[token], sizeof sums[token]);
  }
}

// As many columns at once as there are registers for their sums.
template <Numbers kind, std::size_t tokens>
NVME_INLINE void multiply_columns(const PackedMatrix& matrix, const std::uint32_t* order, const float* inputs,
                                  std::size_t begin, std::size_t end, float* out) {
  constexpr std::size_t kVectors = tokens == 1 ? 8 : tokens == 2 ? 4 : 2;
  for (; begin + 8 * kVectors <= end; begin += 8 * kVectors) {
    multiply_columns_at<kind, tokens, kVectors>(matrix, order, inputs, begin, out);
  }
  for (; begin < end; begin += 8) multiply_columns_at<kind, tokens, 1>(matrix, order, inputs, begin, out);
}

template <std::size_t tokens>
NVME_VERSIONS void multiply_columns(const PackedMatrix& matrix, const std::uint32_t* order, const float* inputs,
                                    std::size_t begin, std::size_t end, float* out) {
  switch (matrix.numbers_as) {
    case Numbers::Stacked4:
      return multiply_columns<Numbers::Stacked4, tokens>(matrix, order, inputs, begin, end, out);
    case Numbers::Stacked8:
      return multiply_columns<Numbers::Stacked8, tokens>(matrix, order, inputs, begin, end, out);
    default:
      return multiply_columns<Numbers::EvenFirst, tokens>(matrix, order, inputs, begin, end, out);
  }
}

}  // namespace

void multiply_columns(const PackedMatrix& matrix, const std::uint32_t* order, const float* inputs, std::size_t tokens,
                      std::size_t begin, std::size_t end, float* out) {
  constexpr decltype(&multiply_columns<1>) kBy[] = {multiply_columns<1>, multiply_columns<2>, multiply_columns<3>,
                                                    multiply_columns<4>};
  return kBy[tokens - 1](matrix, order, inputs, begin, end, out);
}

std::size_t even_first_in(const PackedMatrix& matrix) {
#if defined(__x86_64__)
  if (matrix.numbers_as <= Numbers::HighFirst && row_of(matrix, 1) != nullptr) return is_short(matrix) ? 8 : 16;
#else
  (void)matrix;
#endif
  return 1;
}

void multiply(const PackedMatrix& matrix, const float* inputs, std::size_t tokens, std::size_t begin, std::size_t end,
              float* out) {
#if defined(__x86_64__)
  if (const Row multiply_one = row_of(matrix, tokens)) {
    float scales[kMostGroups], of_zeros[kMostGroups], totals[kMostTokens][kMostGroups];
    const std::size_t groups = matrix.groups();
    for (std::size_t i = 0; matrix.added != nullptr && i < tokens * groups; ++i) {  // what is added is multiplied with
      const float* const first = inputs + i / groups * matrix.columns + i % groups * matrix.group;
      totals[i / groups][i % groups] = std::accumulate(first, first + matrix.group, 0.F);
    }
    for (std::size_t row = begin, first = 0; row < end; ++row) {
      if (const std::size_t next = row / matrix.rows_of_scale * groups; row == begin || next != first) {
        read_scales(matrix, first = next, groups, scales);
      }
      multiply_one(matrix, row, scales, zeros_of(matrix, first, groups, of_zeros), inputs, out);
      if (matrix.added == nullptr) continue;
      read_added(matrix, first, groups, of_zeros);
      for (std::size_t token = 0; token < tokens; ++token) {
        out[token * matrix.rows + row] += dot(of_zeros, totals[token], groups);
      }
    }
    return;
  }
#endif
  alignas(64) float values[kPiece];
  const std::size_t step = std::max<std::size_t>(1, kPiece / matrix.group) * matrix.group;
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t token = 0; token < tokens; ++token) out[token * matrix.rows + row] = 0;
    for (std::size_t at = 0, count; at < matrix.columns; at += count) {
      count = std::min({kPiece, step - at % step, matrix.columns - at});
      expand_part(matrix, row, at, count, values);
      for (std::size_t token = 0; token < tokens; ++token) {
        out[token * matrix.rows + row] += dot(values, inputs + token * matrix.columns + at, count);
      }
    }
  }
}

}  // namespace nvme_ops
#if !defined(__clang__)
#pragma GCC pop_options
#endif
