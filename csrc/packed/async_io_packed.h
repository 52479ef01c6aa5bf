// Expands matrices that are stored as numbers of 4 to 8 bits with scales into floating-point values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_ops {

enum class Floating : std::uint8_t { Bfloat16, Float16, Float32 };

// How the numbers of a row are stored: two in a byte; in words of 32 bits with those of the rows that follow (Stacked),
// or of eight columns, the even ones first; one in a byte; or in blocks of GGUF, which have their scales in them
// (ggml-common.h of llama.cpp).
enum class Numbers : std::uint8_t {
  LowFirst,
  HighFirst,
  Stacked4,
  Stacked8,
  EvenFirst,
  Int8,
  Biased8,
  E4m3,
  E5m2,
  Q4_0,
  Q8_0,
  Mxfp4,
  Q4_K,
  Q5_K,
  Q6_K
};

// How scales are stored; E8m0: exponents of two, 127 stands for 1 and 255 for NaN (OCP Microscaling Formats 1.0).
// Nested: each byte selects a number, and these have scales of their own, followed by no other parts.
enum class Scales : std::uint8_t { None, Float32, Bfloat16, Float16, E4m3, E8m0, Nested };
inline constexpr std::size_t kNested = 256;  // scales that share one

struct PackedMatrix {
  Numbers numbers_as;
  Scales scales_as;
  std::size_t rows, columns;
  std::size_t group, rows_of_scale;  // columns, and rows, that a scale is for
  float divisor;                     // of all scales; is added to nested ones
  const std::uint8_t* numbers;
  const float* table;                // what each of 16 numbers of 4 bits stands for
  const std::uint8_t* scales;        // row by row, but for those that something is added to
  const float* zeros;                // of the same shape, subtracted first; or null, as `packed_zeros` may be:
  const std::uint8_t* packed_zeros;  // words of 32 bits for rows, or columns where numbers do, that follow each other
  std::size_t bits_of_zero;
  float least_zero;                // what is packed as 0
  const float* scale_table;        // what each byte of nested scales selects
  const std::uint8_t* nested;      // their scales, in float32
  const std::uint8_t* row_groups;  // which of the rows of scales is for each row, as 32 bits; or null
  const std::uint8_t* added;       // to the products, stored as the scales are, both group by group; or null

  std::size_t groups() const { return (columns + group - 1) / group; }
  std::size_t scale_rows() const { return (rows + rows_of_scale - 1) / rows_of_scale; }
  std::size_t scale_row(std::size_t row) const;
  // Whether words hold the numbers, and each column of some rows has a scale and a zero point.
  bool in_words() const { return numbers_as >= Numbers::Stacked4 && numbers_as <= Numbers::EvenFirst; }
};

// Bytes of so many columns of a row; 0 if they do not fill whole bytes, or blocks.
std::size_t bytes_of_row(Numbers numbers, std::size_t columns);

// Rows that share a word: these follow each other, and the matrix has whole words.
std::size_t rows_of_word(Numbers numbers);

// Fills `out`, of rows * columns values of this type, with rows [begin, end), or its transpose with these as columns.
// Transposed groups have at most kLongestGroup columns.
inline constexpr std::size_t kLongestGroup = 512;
void expand(const PackedMatrix& matrix, Floating type, bool transposed, std::size_t begin, std::size_t end, void* out);

// Fills `out` with `count` values of a row from column `at` on, where a group or block begins, or part of one group.
void expand_part(const PackedMatrix& matrix, std::size_t row, std::size_t at, std::size_t count, float* out);

// Fills `out` with the scales of groups [first, first + count), divided, or with what is added to their products; or
// returns zero points, made in `out`, or null.
void read_scales(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out);
void read_added(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out);
const float* zeros_of(const PackedMatrix& matrix, std::size_t first, std::size_t count, float* out);

// Converts values from and to float32.
void widen(Floating type, const void* from, std::size_t count, float* out);
void narrow(Floating type, const float* from, std::size_t count, void* out);

// Multiplies rows [begin, end) with each of `tokens` rows of as many inputs, of which there are matrix.columns. `out`
// has matrix.rows sums for each token; these are made in float32, in another order than a matrix product makes them.
inline constexpr std::size_t kMostTokens = 4;
void multiply(const PackedMatrix& matrix, const float* inputs, std::size_t tokens, std::size_t begin, std::size_t end,
              float* out);

// The same with the transposed matrix, whose numbers are in words: columns [begin, end), in eights, of matrix.columns
// sums, and matrix.rows inputs for each token. `order` has the rows by their groups, or is null if these follow each
// other.
void multiply_columns(const PackedMatrix& matrix, const std::uint32_t* order, const float* inputs, std::size_t tokens,
                      std::size_t begin, std::size_t end, float* out);

// In pieces of how many inputs `multiply` wants the even ones before the odd ones; 1: as they are.
std::size_t even_first_in(const PackedMatrix& matrix);

}  // namespace nvme_ops
