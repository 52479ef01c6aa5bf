#include "packed/async_io_packed.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "packed/async_io_versions.h"

// A product and a sum are rounded each, as in the formats' own packages; loops become vectors.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("O3,fp-contract=off,no-trapping-math")
#pragma GCC diagnostic ignored "-Wpsabi"  // of functions that are inlined
#endif

namespace nvme_ops {
namespace {

constexpr std::size_t kBlock = 32, kSuper = 256;  // values in a block of GGUF, and in one of its "K" formats
constexpr std::size_t kTile = 64;                 // rows that are transposed at once

using Bytes = std::uint8_t __attribute__((vector_size(16)));
using Words = std::int32_t __attribute__((vector_size(16)));  // compared in one instruction, as unsigned ones are not
using Floats = float __attribute__((vector_size(16)));

NVME_INLINE float half(const std::uint8_t* at) {  // float16
  std::uint16_t word;
  std::memcpy(&word, at, sizeof word);
  const std::uint32_t rest = word & 0x7fffU, sign = static_cast<std::uint32_t>(word & 0x8000U) << 16;
  const float small = static_cast<float>(rest) * 0x1p-24F;
  const std::uint32_t large = (rest << 13) + (rest < 0x7c00 ? 112U << 23 : 224U << 23);
  return bits<float>(sign | (rest < 0x400 ? bits<std::uint32_t>(small) : large));
}

// The lower halves of words, rounded to the nearest, ties to even; NaN as torch writes it.
template <class Word, class Float>
NVME_INLINE Word rounded(const Float& value, bool to_float16) {
  const Word word = bits<Word>(value), rest = word & 0x7fffffff, zero{};
  if (!to_float16) {
    const Word made = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    return rest > 0x7f800000 ? zero + 0x7fc0 : made;
  }
  const Word small = bits<Word>(bits<Float>(rest) + 0.5F) - 0x3f000000;  // bits of 0.5
  Word made = (rest + 0xfff + ((rest >> 13) & 1) - 0x38000000) >> 13;
  made = rest < 0x38800000 ? small : made;
  made = rest >= 0x477ff000 ? zero + 0x7c00 : made;
  return (word >> 31 << 15) | (rest > 0x7f800000 ? zero + 0x7e00 : made);
}

// Stores what `value` returns of 0 to `count` - 1. Not unrolled, so that the compiler makes vectors of it.
template <class Value>
NVME_INLINE void fill(std::uint16_t* out, std::size_t count, bool to_float16, Value&& value) {
  if (to_float16) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::uint16_t>(rounded<std::uint32_t>(value(i), true));
  } else {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < count; ++i)
      out[i] = static_cast<std::uint16_t>(rounded<std::uint32_t>(value(i), false));
  }
}
template <class Value>
NVME_INLINE void fill(float* out, std::size_t count, bool, Value&& value) {
#pragma GCC unroll 1
  for (std::size_t i = 0; i < count; ++i) out[i] = value(i);
}

NVME_INLINE Bytes bytes_at(const std::uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

template <Numbers kind>
NVME_INLINE float number(int byte) {
  if constexpr (kind == Numbers::Int8) return static_cast<float>(static_cast<std::int8_t>(byte));
  if constexpr (kind == Numbers::Biased8) return static_cast<float>(byte - 128);  // 128 stands for 0
  constexpr int mantissa = kind == Numbers::E4m3 ? 3 : 2, bias = kind == Numbers::E4m3 ? 7 : 15;
  constexpr int last = kind == Numbers::E4m3 ? 0x7f : 0x7c;  // NaN; infinity and NaN
  const std::int32_t rest = byte & 0x7f;
  const std::uint32_t sign = (static_cast<std::uint32_t>(byte) & 0x80U) << 24;
  const float small = static_cast<float>(rest) * (kind == Numbers::E4m3 ? 0x1p-9F : 0x1p-16F);
  const std::int32_t large = (rest << (23 - mantissa)) + ((127 - bias) << 23);
  const std::int32_t made = rest >= last ? large | 0x7f800000 : large;
  return bits<float>(sign | bits<std::uint32_t>(rest < (1 << mantissa) ? bits<std::int32_t>(small) : made));
}

enum class Order { LowFirst, HighFirst, Halves };  // of a byte's numbers; Halves: the lower ones of all bytes first

#if defined(__clang__)
#define NVME_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
NVME_INLINE Bytes shuffle(const Bytes& from, const Bytes& places) {
  Bytes made;
  for (int i = 0; i < 16; ++i) made[i] = from[places[i]];
  return made;
}
#else
#define NVME_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Bytes{__VA_ARGS__}))
NVME_INLINE Bytes shuffle(const Bytes& from, const Bytes& places) {
  return __builtin_shuffle(from, places);
}
#endif

// Two vectors, whose bytes or words alternate.
NVME_INLINE void alternate(const Bytes& a, const Bytes& b, Bytes* out) {
  out[0] = NVME_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  out[1] = NVME_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
NVME_INLINE void alternate_words(const Bytes& a, const Bytes& b, Bytes* out) {
  out[0] = NVME_SHUFFLE(a, b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
  out[1] = NVME_SHUFFLE(a, b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
}

// The values of which a number of 4 bits selects one: their lower and upper bytes, which are shuffled, or they
// themselves.
struct BytesOfValues {
  Bytes lower, upper;
};
struct FloatValues {
  float values[16];
};

NVME_INLINE void set(BytesOfValues& table, const float* codes, float zero, float scale, bool to_float16,
                     bool is_added = false) {
  Floats values[4];
  Bytes parts[4];
  std::memcpy(values, codes, sizeof values);
  for (int i = 0; i < 4; ++i) {
    const Floats made = is_added ? values[i] * scale + zero : (values[i] - zero) * scale;
    parts[i] = bits<Bytes>(rounded<Words>(made, to_float16));
  }
  const Bytes a = NVME_SHUFFLE(parts[0], parts[1], 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const Bytes b = NVME_SHUFFLE(parts[2], parts[3], 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  table.lower = NVME_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  table.upper = NVME_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
NVME_INLINE void set(FloatValues& table, const float* codes, float zero, float scale, bool, bool is_added = false) {
  for (int i = 0; i < 16; ++i) table.values[i] = is_added ? codes[i] * scale + zero : (codes[i] - zero) * scale;
}

// Fills `out` with what the numbers in `count` bytes, at most 16, select; of Halves the second ones go elsewhere.
template <Order order, std::size_t count>
NVME_INLINE void select_at_once(const BytesOfValues& table, const std::uint8_t* from, std::uint16_t* out,
                                std::uint16_t* second_half) {
  using Pair = std::uint64_t __attribute__((vector_size(16)));
  std::uint64_t words[2]{};
  std::memcpy(words, from, count);
  const auto bytes = bits<Bytes>(Pair{words[0], words[1]});
  Bytes made[4], pairs[4];
  const Bytes low = bytes & 15, high = bytes >> 4;
  const Bytes first = order == Order::HighFirst ? high : low, second = order == Order::HighFirst ? low : high;
  alternate(shuffle(table.lower, first), shuffle(table.upper, first), made);
  alternate(shuffle(table.lower, second), shuffle(table.upper, second), made + 2);
  if constexpr (order == Order::Halves) {
    std::memcpy(out, made, 2 * count);
    std::memcpy(second_half, made + 2, 2 * count);
  } else {
    alternate_words(made[0], made[2], pairs);
    alternate_words(made[1], made[3], pairs + 2);
    std::memcpy(out, pairs, 4 * count);
  }
}

// Fills `out` with what the numbers of 4 bits in `count` bytes select.
template <Order order>
NVME_INLINE void select(const BytesOfValues& table, const std::uint8_t* from, std::size_t count, std::uint16_t* out) {
  constexpr std::size_t times = order == Order::Halves ? 1 : 2;
  std::size_t at = 0;
  for (; at + 16 <= count; at += 16) {
    select_at_once<order, 16>(table, from + at, out + times * at, out + count + at);
  }
  for (; at + 8 <= count; at += 8) select_at_once<order, 8>(table, from + at, out + times * at, out + count + at);
  for (; at < count; ++at) select_at_once<order, 1>(table, from + at, out + times * at, out + count + at);
}
template <Order order>
NVME_INLINE void select(const FloatValues& table, const std::uint8_t* from, std::size_t count, float* out) {
  for (std::size_t at = 0; at < count; ++at) {
    const float low = table.values[from[at] & 15], high = table.values[from[at] >> 4];
    out[order == Order::Halves ? at : 2 * at] = order == Order::HighFirst ? high : low;
    out[order == Order::Halves ? count + at : 2 * at + 1] = order == Order::HighFirst ? low : high;
  }
}

// Integers of columns that follow each other, from words that each hold those of eight.
NVME_INLINE void from_words(const std::uint8_t* from, std::size_t count, bool even_first, std::int32_t* out) {
  using Eight = std::uint32_t __attribute__((vector_size(32)));
  const Eight shifts = even_first ? Eight{0, 16, 4, 20, 8, 24, 12, 28} : Eight{0, 4, 8, 12, 16, 20, 24, 28};
  for (std::size_t i = 0; i < count; i += 8) {
    std::uint32_t word;
    std::memcpy(&word, from + i / 2, sizeof word);
    const Eight made = ((Eight{} + word) >> shifts) & 15;
    std::memcpy(out + i, &made, sizeof made);
  }
}

// Integers of columns [at, at + count) of a row, whose numbers begin at `from`.
NVME_INLINE void integers(const PackedMatrix& matrix, const std::uint8_t* from, std::size_t row, std::size_t count,
                          std::int32_t* out) {
  if (matrix.numbers_as == Numbers::EvenFirst) return from_words(from, count, true, out);
  const std::uint32_t bits = matrix.numbers_as == Numbers::Stacked4 ? 4 : 8, mask = (1U << bits) - 1;
  const std::uint32_t shift = row % (32 / bits) * bits;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, from + 4 * i, sizeof word);
    out[i] = static_cast<std::int32_t>((word >> shift) & mask);
  }
}

template <class Out>
using TableOf = std::conditional_t<sizeof(Out) == 2, BytesOfValues, FloatValues>;

constexpr float kCounting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float kE2m1Twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.F, -1, -2, -3, -4, -6, -8, -12};

// One block of GGUF.
template <Numbers kind, class Out>
NVME_INLINE void block(const std::uint8_t* from, Out* out, bool to_float16) {
  TableOf<Out> table;
  if constexpr (kind == Numbers::Q8_0) {
    const float scale = half(from);
    fill(out, 32, to_float16, [=](std::size_t i) { return number<Numbers::Int8>(from[2 + i]) * scale; });
  } else if constexpr (kind == Numbers::Q4_0 && sizeof(Out) == sizeof(float)) {
    const float scale = half(from);
    const auto scaled = [=](int number) { return static_cast<float>(number - 8) * scale; };
    fill(out, 16, to_float16, [=](std::size_t i) { return scaled(from[2 + i] & 15); });
    fill(out + 16, 16, to_float16, [=](std::size_t i) { return scaled(from[2 + i] >> 4); });
  } else if constexpr (kind == Numbers::Q4_0) {
    set(table, kCounting, 8, half(from), to_float16);
    select<Order::Halves>(table, from + 2, kBlock / 2, out);
  } else if constexpr (kind == Numbers::Mxfp4) {  // 2**(e - 128), as E2M1 is doubled in the table
    const std::int32_t e = *from;
    const float scale = bits<float>(e < 2 ? 0x200000 << e : (e - 1) << 23);
    set(table, kE2m1Twice, 0, scale, to_float16);
    select<Order::Halves>(table, from + 1, kBlock / 2, out);
  } else if constexpr (kind == Numbers::Q6_K) {
    const float scale = half(from + 208);
    for (int part = 0; part < 16; ++part) {  // of 16 values with a scale
      const int shift = part / 4 % 2 * 4, higher = part / 2 % 4 * 2;
      const std::uint8_t *low = from + part / 8 * 64 + part % 4 * 16,
                         *high = from + 128 + part / 8 * 32 + part % 2 * 16;
      const float scaled = scale * static_cast<float>(static_cast<std::int8_t>(from[192 + part]));
      fill(out + 16 * part, 16, to_float16, [=](std::size_t i) {
        return scaled * static_cast<float>(((low[i] >> shift & 15) | (high[i] >> higher & 3) << 4) - 32);
      });
    }
  } else {  // Q4_K, Q5_K: eight groups, each with a scale and a least value of 6 bits
    const float scale = half(from), least = half(from + 2);
    const std::uint8_t *six = from + 4, *fifth = from + 16, *low = from + (kind == Numbers::Q5_K ? 48 : 16);
    for (int group = 0; group < 8; ++group) {
      const int upper = group < 4 ? 0 : six[group + 4];
      const int of_scale = group < 4 ? six[group] & 63 : (upper & 15) | six[group - 4] >> 6 << 4;
      const int of_least = group < 4 ? six[group + 4] & 63 : upper >> 4 | six[group] >> 6 << 4;
      const float scaled = scale * static_cast<float>(of_scale), begin = least * static_cast<float>(of_least);
      const std::uint8_t* numbers = low + group / 2 * 32;
      const int shift = group % 2 * 4;
      fill(out + 32 * group, 32, to_float16, [=](std::size_t i) {
        int value = numbers[i] >> shift & 15;
        if constexpr (kind == Numbers::Q5_K) value |= (fifth[i] >> group & 1) << 4;
        return scaled * static_cast<float>(value) - begin;
      });
    }
  }
}

constexpr std::size_t bytes_of_block(Numbers kind) {
  switch (kind) {
    case Numbers::Q4_0:
      return 18;
    case Numbers::Q8_0:
      return 34;
    case Numbers::Mxfp4:
      return 17;
    case Numbers::Q4_K:
      return 144;
    case Numbers::Q5_K:
      return 176;
    case Numbers::Q6_K:
      return 210;
    default:
      return 0;
  }
}

constexpr std::size_t values_of_block(Numbers kind) {
  return bytes_of_block(kind) == 0 ? 0 : kind < Numbers::Q4_K ? kBlock : kSuper;
}

// Scales are read of so many groups at once.
constexpr std::size_t kScalesAtOnce = 64;

NVME_INLINE void scales_of(const PackedMatrix& matrix, const std::uint8_t* from, std::size_t first, std::size_t count,
                           float* out) {
  const auto set = [&](auto&& scale) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < count; ++i) out[i] = scale(first + i);
  };
  switch (matrix.scales_as) {
    case Scales::None:
      set([](std::size_t) { return 1.F; });
      break;
    case Scales::Float32:
      std::memcpy(out, from + 4 * first, 4 * count);
      break;
    case Scales::Float16:
      set([=](std::size_t i) { return half(from + 2 * i); });
      break;
    case Scales::E4m3:
      set([=](std::size_t i) { return number<Numbers::E4m3>(from[i]); });
      break;
    case Scales::Bfloat16:
      set([=](std::size_t i) {
        std::uint16_t word;
        std::memcpy(&word, from + 2 * i, sizeof word);
        return bits<float>(static_cast<std::uint32_t>(word) << 16);
      });
      break;
    case Scales::E8m0:
      set([=](std::size_t i) {
        const std::uint32_t exponent = from[i], made = exponent == 0 ? 0x400000 : exponent << 23;
        return bits<float>(exponent == 255 ? 0x7fc00000 : made);
      });
      break;
    case Scales::Nested:
      for (std::size_t i = first; i < first + count; ++i) {
        float scale;
        std::memcpy(&scale, matrix.nested + i / kNested * sizeof scale, sizeof scale);
        out[i - first] = matrix.scale_table[from[i]] * scale + matrix.divisor;
      }
      return;
  }
  if (matrix.divisor != 1) {
    for (std::size_t i = 0; i < count; ++i) out[i] /= matrix.divisor;
  }
}

template <Numbers kind>
using Kind = std::integral_constant<Numbers, kind>;

// Groups of a row, whose numbers begin at `from`: `count` values, with the scales and zero points given.
template <Numbers kind, class Out>
NVME_INLINE void groups_as(const std::uint8_t* from, std::size_t count, const PackedMatrix& matrix, const float* scales,
                           const float* zeros, Out* out, bool to_float16) {
  if (kind != Numbers::LowFirst && matrix.group == 1) {  // in one loop, of which vectors are made
    return fill(out, count, to_float16,
                [=](std::size_t n) { return (number<kind>(from[n]) - (zeros == nullptr ? 0 : zeros[n])) * scales[n]; });
  }
  for (std::size_t at = 0, i = 0; at < count; at += matrix.group, ++i) {
    const std::size_t length = std::min(matrix.group, count - at);
    const float scale = scales[i], zero = zeros == nullptr ? 0 : zeros[i];
    if constexpr (kind <= Numbers::HighFirst) {
      constexpr Order order = kind == Numbers::LowFirst ? Order::LowFirst : Order::HighFirst;
      TableOf<Out> table;
      set(table, matrix.table, zero, scale, to_float16, matrix.added != nullptr);
      select<order>(table, from + at / 2, length / 2, out + at);
    } else {
      const std::uint8_t* numbers = from + at;
      fill(out + at, length, to_float16, [=](std::size_t n) { return (number<kind>(numbers[n]) - zero) * scale; });
    }
  }
}

// Bytes from the first number of a row to one of its columns.
NVME_INLINE std::size_t bytes_to(const PackedMatrix& matrix, std::size_t column) {
  const bool stacked = matrix.in_words() && matrix.numbers_as != Numbers::EvenFirst;
  return stacked ? 4 * column : bytes_of_row(matrix.numbers_as, column);
}

// Scales and zero points from a group on, kept because rows that follow each other may have the same.
struct Factors {
  std::size_t first = 0, count = 0;
  float scales[kScalesAtOnce], made[kScalesAtOnce];
  const float* zeros = nullptr;

  NVME_INLINE void read(const PackedMatrix& matrix, std::size_t group, std::size_t of_groups) {
    if (count == of_groups && first == group) return;
    first = group, count = of_groups;
    read_scales(matrix, group, of_groups, scales);
    zeros = zeros_of(matrix, group, of_groups, made);
    if (matrix.added != nullptr) read_added(matrix, group, of_groups, made), zeros = made;
  }
};

// A part of a row: `count` values, whose first group or block begins at `from`.
template <class Out>
NVME_INLINE void part(const std::uint8_t* from, std::size_t row, std::size_t count, const PackedMatrix& matrix,
                      std::size_t group, Factors& factors, Out* out, bool to_float16) {
  const std::size_t values = values_of_block(matrix.numbers_as), bytes = bytes_of_block(matrix.numbers_as);
  for (const Out* const end = out + count; values != 0 && out < end; from += bytes, out += values) {
    switch (matrix.numbers_as) {
      case Numbers::Q4_0:
        block<Numbers::Q4_0>(from, out, to_float16);
        break;
      case Numbers::Q8_0:
        block<Numbers::Q8_0>(from, out, to_float16);
        break;
      case Numbers::Mxfp4:
        block<Numbers::Mxfp4>(from, out, to_float16);
        break;
      case Numbers::Q4_K:
        block<Numbers::Q4_K>(from, out, to_float16);
        break;
      case Numbers::Q5_K:
        block<Numbers::Q5_K>(from, out, to_float16);
        break;
      default:
        block<Numbers::Q6_K>(from, out, to_float16);
    }
  }
  if (values != 0) return;
  const std::size_t of_scales = kScalesAtOnce * matrix.group;  // values
  for (std::size_t at = 0; at < count; at += of_scales, group += kScalesAtOnce) {
    const std::size_t length = std::min(of_scales, count - at);
    factors.read(matrix, group, (length + matrix.group - 1) / matrix.group);
    const float *const scales = factors.scales, *const zeros = factors.zeros;
    const std::uint8_t* const first = from + bytes_to(matrix, at);
    const auto expand_as = [&](auto kind) NVME_INLINED {
      groups_as<decltype(kind)::value>(first, length, matrix, scales, zeros, out + at, to_float16);
    };
    switch (matrix.numbers_as) {
      case Numbers::LowFirst:
        expand_as(Kind<Numbers::LowFirst>());
        break;
      case Numbers::HighFirst:
        expand_as(Kind<Numbers::HighFirst>());
        break;
      case Numbers::Stacked4:
      case Numbers::Stacked8:
      case Numbers::EvenFirst: {
        std::int32_t numbers[kScalesAtOnce];
        integers(matrix, first, row, length, numbers);
        fill(out + at, length, to_float16,
             [&](std::size_t n) { return (static_cast<float>(numbers[n]) - zeros[n]) * scales[n]; });
        break;
      }
      case Numbers::Int8:
        expand_as(Kind<Numbers::Int8>());
        break;
      case Numbers::Biased8:
        expand_as(Kind<Numbers::Biased8>());
        break;
      case Numbers::E4m3:
        expand_as(Kind<Numbers::E4m3>());
        break;
      default:
        expand_as(Kind<Numbers::E5m2>());
    }
  }
}

NVME_VERSIONS void expand_part_of_row(const std::uint8_t* from, std::size_t row, std::size_t count,
                                      const PackedMatrix& matrix, std::size_t group, Factors& factors,
                                      std::uint16_t* out, bool to_float16) {
  part(from, row, count, matrix, group, factors, out, to_float16);
}
NVME_VERSIONS void expand_part_of_row(const std::uint8_t* from, std::size_t row, std::size_t count,
                                      const PackedMatrix& matrix, std::size_t group, Factors& factors, float* out,
                                      bool) {
  part(from, row, count, matrix, group, factors, out, false);
}

// Zero points of columns, which words hold as they do numbers of a row.
NVME_VERSIONS void zeros_of_columns(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out) {
  std::int32_t numbers[kScalesAtOnce];
  const std::uint8_t* from = matrix.packed_zeros + first * matrix.bits_of_zero / 8;
  if (matrix.bits_of_zero == 4) {
    from_words(from, count, matrix.numbers_as == Numbers::EvenFirst, numbers);
  } else {
    for (std::size_t i = 0; i < count; ++i) numbers[i] = from[i];
  }
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(numbers[i]) + matrix.least_zero;
}

// Numbers stored like scales, of groups [first, first + count) of a row, that lie group by group.
NVME_INLINE void by_groups(const PackedMatrix& matrix, const std::uint8_t* from, std::size_t first, std::size_t count,
                           float* out) {
  std::uint8_t together[4 * kScalesAtOnce];
  const std::size_t row = first / matrix.groups(), size = matrix.scales_as == Scales::Float32 ? 4 : 2;
  from += (first % matrix.groups() * matrix.rows + row) * size;
  for (std::size_t length; count != 0; count -= length, out += length) {
    length = std::min(count, kScalesAtOnce);
    for (std::size_t i = 0; i < length; ++i, from += matrix.rows * size) {
      std::memcpy(together + i * size, from, 2);
      if (size == 4) std::memcpy(together + i * size + 2, from + 2, 2);
    }
    scales_of(matrix, together, 0, length, out);
  }
}

template <class Item>
using Tile = Item[kTile][kLongestGroup];

// Writes a tile's columns as rows, which are `stride` items apart.
template <class Item>
void transpose(const Tile<Item>& tile, std::size_t rows, std::size_t columns, Item* out, std::size_t stride) {
  for (std::size_t column = 0; column < columns; ++column) {
    for (std::size_t i = 0; i < rows; ++i) out[column * stride + i] = tile[i][column];
  }
}
NVME_VERSIONS void transpose(const Tile<std::uint16_t>& tile, std::size_t rows, std::size_t columns, std::uint16_t* out,
                             std::size_t stride) {
  if (rows % 8 != 0 || columns % 8 != 0) return transpose<std::uint16_t>(tile, rows, columns, out, stride);
  for (std::size_t column = 0; column < columns; column += 8) {
    for (std::size_t row = 0; row < rows; row += 8) {
      Bytes from[8], to[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&from[i], &tile[row + i][column], 16);
      for (int turn = 0; turn < 3; ++turn) {  // each of 64 items comes to its place
        for (int i = 0; i < 4; ++i) alternate_words(from[i], from[i + 4], to + 2 * i);
        std::memcpy(from, to, sizeof from);
      }
      for (int i = 0; i < 8; ++i) std::memcpy(out + (column + i) * stride + row, &to[i], 16);
    }
  }
}

template <class Out>
void expand_part(const PackedMatrix& matrix, std::size_t row, std::size_t at, std::size_t count, Factors& factors,
                 Out* out, bool to_float16) {
  const std::size_t first = row - row % rows_of_word(matrix.numbers_as);
  const std::uint8_t* from = matrix.numbers + first * bytes_of_row(matrix.numbers_as, matrix.columns);
  expand_part_of_row(from + bytes_to(matrix, at), row, count, matrix,
                     matrix.scale_row(row) * matrix.groups() + at / matrix.group, factors, out, to_float16);
}

template <class Out>
void expand_to(const PackedMatrix& matrix, bool transposed, std::size_t begin, std::size_t end, Out* out,
               bool to_float16) {
  Factors factors;
  if (!transposed) {
    for (std::size_t row = begin; row < end; ++row) {
      expand_part(matrix, row, 0, matrix.columns, factors, out + row * matrix.columns, to_float16);
    }
    return;
  }
  Tile<Out> tile;
  const std::size_t step = matrix.in_words() ? kScalesAtOnce : kLongestGroup / matrix.group * matrix.group;
  for (std::size_t row = begin; row < end; row += kTile) {
    const std::size_t rows = std::min(kTile, end - row);
    for (std::size_t at = 0; at < matrix.columns; at += step) {
      const std::size_t columns = std::min(step, matrix.columns - at);
      for (std::size_t i = 0; i < rows; ++i) {
        expand_part(matrix, row + i, at, columns, factors, tile[i], to_float16);
      }
      transpose(tile, rows, columns, out + at * matrix.rows + row, matrix.rows);
    }
  }
}

}  // namespace

NVME_VERSIONS void read_scales(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out) {
  if (matrix.added != nullptr) return by_groups(matrix, matrix.scales, first, count, out);
  scales_of(matrix, matrix.scales, first, count, out);
}

NVME_VERSIONS void read_added(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out) {
  by_groups(matrix, matrix.added, first, count, out);
}

void expand_part(const PackedMatrix& matrix, std::size_t row, std::size_t at, std::size_t count, float* out) {
  Factors factors;
  expand_part(matrix, row, at, count, factors, out, false);
}

const float* zeros_of(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out) {
  if (matrix.packed_zeros == nullptr) return matrix.zeros == nullptr ? nullptr : matrix.zeros + first;
  if (matrix.in_words()) {
    zeros_of_columns(matrix, first, count, out);
    return out;
  }
  const std::size_t of_word = 32 / matrix.bits_of_zero, row = first / matrix.groups();
  const std::uint8_t* words = matrix.packed_zeros + 4 * (row / of_word * matrix.groups() + first % matrix.groups());
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, words + 4 * i, sizeof word);
    const std::uint32_t zero = (word >> (row % of_word * matrix.bits_of_zero)) & ((1U << matrix.bits_of_zero) - 1);
    out[i] = static_cast<float>(zero) + matrix.least_zero;
  }
  return out;
}

NVME_VERSIONS void widen(Floating type, const void* from, std::size_t count, float* out) {
  const auto* bytes = static_cast<const std::uint8_t*>(from);
  if (type == Floating::Float32) {
    std::memcpy(out, from, count * sizeof(float));
  } else if (type == Floating::Float16) {
    for (std::size_t i = 0; i < count; ++i) out[i] = half(bytes + 2 * i);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t word;
      std::memcpy(&word, bytes + 2 * i, sizeof word);
      out[i] = bits<float>(static_cast<std::uint32_t>(word) << 16);
    }
  }
}

NVME_VERSIONS void narrow(Floating type, const float* from, std::size_t count, void* out) {
  if (type == Floating::Float32) {
    std::memcpy(out, from, count * sizeof(float));
  } else {
    fill(static_cast<std::uint16_t*>(out), count, type == Floating::Float16, [=](std::size_t i) { return from[i]; });
  }
}

std::size_t bytes_of_row(Numbers numbers, std::size_t columns) {
  if (const std::size_t values = values_of_block(numbers)) {
    return columns % values == 0 ? columns / values * bytes_of_block(numbers) : 0;
  }
  if (numbers == Numbers::Stacked8 || numbers >= Numbers::Int8) return columns;
  return columns % (numbers <= Numbers::HighFirst ? 2 : 8) == 0 ? columns / 2 : 0;
}

std::size_t rows_of_word(Numbers numbers) {
  return numbers == Numbers::Stacked4 ? 8 : numbers == Numbers::Stacked8 ? 4 : 1;
}

std::size_t PackedMatrix::scale_row(std::size_t row) const {
  if (row_groups == nullptr) return row / rows_of_scale;
  std::uint32_t group;
  std::memcpy(&group, row_groups + 4 * row, sizeof group);
  return group;
}

void expand(const PackedMatrix& matrix, Floating type, bool transposed, std::size_t begin, std::size_t end, void* out) {
  if (type == Floating::Float32) {
    expand_to(matrix, transposed, begin, end, static_cast<float*>(out), false);
  } else {
    expand_to(matrix, transposed, begin, end, static_cast<std::uint16_t*>(out), type == Floating::Float16);
  }
}

}  // namespace nvme_ops
#if !defined(__clang__)
#pragma GCC pop_options
#endif
