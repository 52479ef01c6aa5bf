#include "base/crc.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nvme_ops {
namespace {

// Polynomials over GF(2) modulo the CRC's, bit-reflected as both CRCs are: bit 31 is the coefficient of x^0.
constexpr std::uint32_t polynomial(Crc kind) {
  return kind == Crc::Crc32 ? 0xEDB88320U : 0x82F63B78U;
}

constexpr std::uint32_t kOne = 1U << 31;

constexpr std::uint32_t times_x(Crc kind, std::uint32_t value) {
  return (value >> 1) ^ ((value & 1) != 0 ? polynomial(kind) : 0);
}

constexpr std::uint32_t times(Crc kind, std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(kind, b);
  }
  return product;
}

constexpr std::uint32_t power_of_x(Crc kind, std::uint64_t exponent) {
  std::uint32_t result = kOne, square = times_x(kind, kOne);
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = times(kind, result, square);
    square = times(kind, square, square);
  }
  return result;
}

// Slicing by eight: eight tables process eight bytes at a time.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables(Crc kind) {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(kind, value);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables[] = {make_tables(Crc::Crc32), make_tables(Crc::Crc32c)};

// `state` is the inverted checksum.
std::uint32_t table_driven(Crc kind, const std::byte* data, std::size_t bytes, std::uint32_t state) {
  const Tables& tables = kTables[static_cast<std::size_t>(kind)];
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= state;
    state = tables[7][low & 0xFF] ^ tables[6][(low >> 8) & 0xFF] ^ tables[5][(low >> 16) & 0xFF] ^
            tables[4][low >> 24] ^ tables[3][high & 0xFF] ^ tables[2][(high >> 8) & 0xFF] ^
            tables[1][(high >> 16) & 0xFF] ^ tables[0][high >> 24];
  }
  for (; bytes > 0; ++data, --bytes) {
    state = (state >> 8) ^ tables[0][(state ^ static_cast<std::uint32_t>(*data)) & 0xFF];
  }
  return state;
}

#if defined(__x86_64__)

// Folding by carry-less multiplication: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel, 2009. What remains, 16 bytes with the same remainder as all before, goes through the tables.
constexpr std::uint64_t fold_factor(Crc kind, std::uint64_t exponent) {
  return static_cast<std::uint64_t>(power_of_x(kind, exponent)) << 1;
}
static_assert(fold_factor(Crc::Crc32, 4 * 128 + 32) == 0x154442bd4, "the paper's constant R1");
static_assert(fold_factor(Crc::Crc32, 4 * 128 - 32) == 0x1c6e41596, "the paper's constant R2");

struct Factors {
  std::uint64_t by_64[2], by_16[2];  // for folding over 64 and 16 bytes
};
constexpr Factors make_factors(Crc kind) {
  return {{fold_factor(kind, 4 * 128 + 32), fold_factor(kind, 4 * 128 - 32)},
          {fold_factor(kind, 128 + 32), fold_factor(kind, 128 - 32)}};
}
constexpr Factors kFactors[] = {make_factors(Crc::Crc32), make_factors(Crc::Crc32c)};

__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const std::byte* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) std::uint32_t folded(Crc kind, const std::byte* data, std::size_t bytes,
                                                              std::uint32_t state) {
  const Factors& factors = kFactors[static_cast<std::size_t>(kind)];
  const __m128i by_64 = load(reinterpret_cast<const std::byte*>(factors.by_64));
  const __m128i by_16 = load(reinterpret_cast<const std::byte*>(factors.by_16));
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    a = fold(a, by_64, load(data));
    b = fold(b, by_64, load(data + 16));
    c = fold(c, by_64, load(data + 32));
    d = fold(d, by_64, load(data + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  for (; bytes >= 16; data += 16, bytes -= 16) a = fold(a, by_16, load(data));
  std::byte rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), a);
  return table_driven(kind, data, bytes, table_driven(kind, rest, sizeof rest, 0));
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#endif

}  // namespace

std::uint32_t checksum(Crc kind, const std::byte* data, std::size_t bytes, std::uint32_t crc) {
#if defined(__x86_64__)
  if (bytes >= 64 && can_fold()) return ~folded(kind, data, bytes, ~crc);
#endif
  return plain_checksum(kind, data, bytes, crc);
}

std::uint32_t plain_checksum(Crc kind, const std::byte* data, std::size_t bytes, std::uint32_t crc) {
  return ~table_driven(kind, data, bytes, ~crc);
}

std::uint32_t joined(Crc kind, std::uint32_t first, std::uint32_t second, std::uint64_t bytes) {
  return times(kind, power_of_x(kind, bytes * 8), first) ^ second;
}

}  // namespace nvme_ops
