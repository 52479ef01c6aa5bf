// Expands a packed matrix or states, multiplies or packs states, on the threads on which torch computes.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "binding/memory.h"
#include "binding/module.h"
#include "binding/python.h"
#include "packed/async_io_packed.h"
#include "packed/async_io_states.h"

namespace nvme_ops {
namespace {

constexpr std::size_t kLeastValues = 1 << 16;  // of a thread

// Torch's own OpenMP, whatever its file is called; threads of another one would compete with its threads, which spin.
using Parallel = void (*)(void (*function)(void*), void* argument, unsigned threads, unsigned flags);
Parallel parallel_of_torch() {
  static const Parallel parallel = [] {
    void* const library = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Parallel>(library == nullptr ? nullptr : ::dlsym(library, "GOMP_parallel"));
  }();
  return fork_generation() == 0 ? parallel : nullptr;  // its threads do not exist in a forked child
}

// Calls `function` with [begin, end) parts of `count` rows, on up to so many threads. It must not throw.
template <class Function>
void in_parallel(std::size_t count, std::size_t threads, Function&& function) {
  struct Work {
    Function& function;
    std::size_t count, step;
    std::atomic<std::size_t> next{0};
    void run() {
      for (std::size_t at; (at = next.fetch_add(step)) < count;) function(at, std::min(count, at + step));
    }
  };
  const Parallel parallel = threads > 1 ? parallel_of_torch() : nullptr;
  Work work{function, count, parallel == nullptr ? count : std::max<std::size_t>(1, count / (4 * threads))};
  if (parallel == nullptr) return work.run();
  parallel([](void* argument) { static_cast<Work*>(argument)->run(); }, &work, static_cast<unsigned>(threads), 0);
}

template <class Kind>
Kind kind_named(const char* name, std::initializer_list<const char*> names) {
  const auto found =
      std::find_if(names.begin(), names.end(), [&](const char* one) { return std::strcmp(one, name) == 0; });
  if (found == names.end()) raise(bad_argument(std::string("there is no ") + name));
  return static_cast<Kind>(found - names.begin());
}

const std::uint8_t* bytes_of(const Memory& memory) {
  return reinterpret_cast<const std::uint8_t*>(memory.data);
}

// The memory of a tensor, which `kept` keeps: all or at least so many bytes of it.
Memory in_host(PyObject* tensor, Op op, std::size_t least, const char* argument, std::vector<Memory>& kept) {
  kept.push_back(memory_of(tensor, op, argument));
  const Memory& memory = kept.back();
  if (memory.device) raise(bad_argument(std::string(argument) + " must lie in CPU memory"));
  if (memory.bytes < least) raise(bad_argument(std::string(argument) + " has too few bytes"));
  return memory;
}

// Parses a matrix. Its numbers, and scales and zero points unless given, begin at byte `at` of `stored`, which becomes
// the byte after them.
PackedMatrix packed_matrix(PyObject* packed, const Memory& stored, std::size_t& at, std::vector<Memory>& kept) {
  PackedMatrix matrix{};
  const char *numbers_as, *scales_as;
  unsigned long long rows, columns, group, rows_of_scale, bits_of_zero;
  PyObject *table, *scales, *zeros, *scale_table;
  int has_row_groups, is_added;
  if (!PyTuple_Check(packed)) raise_type_error("a packed matrix must be a tuple");
  parse(packed, "ssKKKKfOOOKfOpp", &numbers_as, &scales_as, &rows, &columns, &group, &rows_of_scale, &matrix.divisor,
        &table, &scales, &zeros, &bits_of_zero, &matrix.least_zero, &scale_table, &has_row_groups, &is_added);
  matrix.numbers_as =
      kind_named<Numbers>(numbers_as, {"low_first", "high_first", "stacked4", "stacked8", "even_first", "int8",
                                       "biased8", "e4m3", "e5m2", "q4_0", "q8_0", "mxfp4", "q4_k", "q5_k", "q6_k"});
  matrix.scales_as =
      kind_named<Scales>(scales_as, {"none", "float32", "bfloat16", "float16", "e4m3", "e8m0", "nested"});
  matrix.rows = rows, matrix.columns = columns, matrix.group = group, matrix.rows_of_scale = rows_of_scale;
  matrix.bits_of_zero = bits_of_zero;
  const std::size_t bytes = bytes_of_row(matrix.numbers_as, columns);
  const bool has_table = matrix.numbers_as <= Numbers::HighFirst, in_words = matrix.in_words(),
             nested = matrix.scales_as == Scales::Nested, of_blocks = matrix.numbers_as >= Numbers::Q4_0;
  if (rows == 0 || bytes == 0 || group == 0 || rows_of_scale == 0 || (has_table && group % 2 != 0) ||
      has_table == (table == Py_None) || of_blocks != (matrix.scales_as == Scales::None) ||
      nested == (scale_table == Py_None) ||
      (bits_of_zero != 0 && ((bits_of_zero != 4 && bits_of_zero != 8) || (rows_of_scale != 1 && !in_words))) ||
      (in_words && (group != 1 || bits_of_zero != (matrix.numbers_as == Numbers::Stacked8 ? 8 : 4) ||
                    columns % (32 / bits_of_zero) != 0 || rows % rows_of_word(matrix.numbers_as) != 0)) ||
      (has_row_groups != 0 && !in_words) ||
      (is_added != 0 && (!has_table || matrix.scales_as >= Scales::E4m3 || rows_of_scale != 1 || zeros != Py_None ||
                         bits_of_zero != 0))) {
    raise(bad_argument("such a matrix cannot be packed"));
  }
  const auto take = [&](std::size_t count) {
    if (stored.bytes < at || stored.bytes - at < count) raise(bad_argument("stored has too few bytes"));
    at += count;
    return bytes_of(stored) + at - count;
  };
  const std::size_t count = of_blocks ? 0 : matrix.scale_rows() * matrix.groups();
  const std::size_t size = matrix.scales_as >= Scales::E4m3 ? 1 : matrix.scales_as == Scales::Float32 ? 4 : 2;
  matrix.numbers = take(rows * bytes);
  if (has_table) matrix.table = reinterpret_cast<const float*>(in_host(table, Op::Write, 64, "table", kept).data);
  matrix.scales =
      scales == Py_None ? take(size * count) : bytes_of(in_host(scales, Op::Write, size * count, "scales", kept));
  if (is_added != 0) matrix.added = take(size * count);
  if (nested) {
    matrix.scale_table =
        reinterpret_cast<const float*>(in_host(scale_table, Op::Write, 1024, "scale_table", kept).data);
    matrix.nested = take((count + kNested - 1) / kNested * 4);
  }
  if (zeros != Py_None)
    matrix.zeros = reinterpret_cast<const float*>(in_host(zeros, Op::Write, 4 * count, "zeros", kept).data);
  if (bits_of_zero != 0) {
    matrix.packed_zeros =
        take(in_words ? count * bits_of_zero / 8 : (rows * bits_of_zero + 31) / 32 * 4 * matrix.groups());
  }
  if (has_row_groups != 0) {
    matrix.row_groups = take(4 * rows);
    std::size_t most = 0;
    bool in_order = true;
    for (std::size_t row = 0; row < rows; ++row) {
      most = std::max(most, matrix.scale_row(row));
      in_order = in_order && matrix.scale_row(row) == row / rows_of_scale;
    }
    if (most >= matrix.scale_rows()) raise(bad_argument("a row belongs to a group that is not there"));
    if (most == 0 || in_order) matrix.row_groups = nullptr;  // of zeros alone: there are none
  }
  return matrix;
}

std::size_t threads_for(const PackedMatrix& matrix, int most) {
  return std::clamp<std::size_t>(matrix.rows * matrix.columns / kLeastValues, 1, std::max(1, most));
}

// The rows of a matrix by their groups, in `order`; null if they lie so.
const std::uint32_t* rows_by_groups(const PackedMatrix& matrix, std::vector<std::uint32_t>& order) {
  if (matrix.row_groups == nullptr) return nullptr;
  std::vector<std::size_t> next(matrix.scale_rows() + 1);
  for (std::size_t row = 0; row < matrix.rows; ++row) ++next[matrix.scale_row(row) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  order.resize(matrix.rows);
  for (std::size_t row = 0; row < matrix.rows; ++row) order[next[matrix.scale_row(row)]++] = row;
  return order.data();
}

// The memory of a state map, of which `kept` keeps the tensors.
StateMap state_map(PyObject* map, std::vector<Memory>& kept) {
  PyObject *values, *bounds, *numbers;
  if (!PyTuple_Check(map)) raise_type_error("a state map must be a tuple");
  parse(map, "OOO", &values, &bounds, &numbers);
  return {reinterpret_cast<const float*>(in_host(values, Op::Write, 4 * 256, "values", kept).data),
          reinterpret_cast<const float*>(in_host(bounds, Op::Write, 4 * 256, "bounds", kept).data),
          bytes_of(in_host(numbers, Op::Write, kBeginnings, "numbers", kept))};
}

// Calls `function` with parts of `count` states that begin where blocks do.
template <class Function>
void in_blocks(std::size_t count, int threads, Function&& function) {
  const std::size_t blocks = (count + kStatesOfBlock - 1) / kStatesOfBlock;
  const WithoutGil released;
  in_parallel(blocks, std::clamp<std::size_t>(count / kLeastValues, 1, std::max(1, threads)),
              [&](std::size_t begin, std::size_t end) {
                function(begin * kStatesOfBlock, std::min(count, end * kStatesOfBlock) - begin * kStatesOfBlock);
              });
}

Floating floating_named(const char* name) {
  return kind_named<Floating>(name, {"bfloat16", "float16", "float32"});
}

}  // namespace

PyObject* expand(PyObject*, PyObject* arguments) {
  PyObject *packed, *stored, *out;
  unsigned long long begin;
  const char* type;
  int transposed, threads;
  parse(arguments, "OOKOspi", &packed, &stored, &begin, &out, &type, &transposed, &threads);
  std::vector<Memory> kept;
  std::size_t at = begin;
  const PackedMatrix matrix = packed_matrix(packed, in_host(stored, Op::Write, 0, "stored", kept), at, kept);
  const Floating as = floating_named(type);
  const std::size_t bytes = matrix.rows * matrix.columns * (as == Floating::Float32 ? 4 : 2);
  const Memory target = in_host(out, Op::Read, bytes, "out", kept);
  if (target.bytes != bytes) raise(bad_argument("out has more than the values"));
  if (transposed && matrix.group > kLongestGroup) raise(bad_argument("such groups cannot be transposed"));
  {
    const WithoutGil released;
    in_parallel(matrix.rows, threads_for(matrix, threads), [&](std::size_t first, std::size_t last) {
      expand(matrix, as, transposed != 0, first, last, target.data);
    });
  }
  Py_RETURN_NONE;
}

PyObject* multiply(PyObject*, PyObject* arguments) {
  PyObject *packed, *stored, *inputs, *out;
  const char* type;
  int threads, by_columns;
  parse(arguments, "OOOOsip", &packed, &stored, &inputs, &out, &type, &threads, &by_columns);
  std::vector<Memory> kept;
  std::vector<PackedMatrix> matrices;
  std::vector<std::uint32_t> order;
  std::size_t at = 0, width = 0, height = 0;
  const Memory bytes = in_host(stored, Op::Write, 0, "stored", kept);
  const Items items(packed, "the packed matrices must be a sequence");
  const auto sums_of = [&](const PackedMatrix& matrix) { return by_columns != 0 ? matrix.columns : matrix.rows; };
  for (std::size_t i = 0; i < items.size(); ++i) {
    const PackedMatrix& matrix = matrices.emplace_back(packed_matrix(items[i], bytes, at, kept));
    width += sums_of(matrix);
    const std::size_t before = height;
    height = by_columns != 0 ? matrix.rows : matrix.columns;
    if (i > 0 && height != before) raise(bad_argument("the matrices must be for inputs of as many values"));
    if (by_columns == 0) continue;
    if (!matrix.in_words() || matrix.columns % 8 != 0 || matrix.rows_of_scale % rows_of_word(matrix.numbers_as) != 0) {
      raise(bad_argument("such a matrix cannot be multiplied by columns"));
    }
  }
  const Floating as = floating_named(type);
  const std::size_t size = as == Floating::Float32 ? 4 : 2;
  const Memory from = in_host(inputs, Op::Write, 1, "inputs", kept), to = in_host(out, Op::Read, 1, "out", kept);
  const std::size_t tokens = height == 0 ? 0 : from.bytes / (size * height);
  if (tokens == 0 || tokens > kMostTokens || from.bytes != tokens * height * size ||
      to.bytes != tokens * width * size) {
    raise(bad_argument("inputs and out must be rows of as many values as the matrix has columns and rows"));
  }
  std::vector<float> wide(tokens * height), sorted(wide.size()), sums(tokens * width);
  {
    const WithoutGil released;
    widen(as, from.data, wide.size(), wide.data());
    std::size_t sorted_in = 1;
    std::byte* next = to.data;
    for (const PackedMatrix& matrix : matrices) {
      if (by_columns != 0) {
        const std::uint32_t* const rows = rows_by_groups(matrix, order);
        in_parallel(matrix.columns / 8, threads_for(matrix, threads), [&](std::size_t first, std::size_t last) {
          multiply_columns(matrix, rows, wide.data(), tokens, 8 * first, 8 * last, sums.data());
        });
      } else {
        const std::size_t piece = even_first_in(matrix);
        if (piece != 1 && piece != sorted_in) {
          for (std::size_t i = 0; i < wide.size(); ++i) {
            sorted[i / piece * piece + i % 2 * (piece / 2) + i % piece / 2] = wide[i];
          }
          sorted_in = piece;
        }
        const float* const given = piece != 1 ? sorted.data() : wide.data();
        in_parallel(matrix.rows, threads_for(matrix, threads), [&](std::size_t first, std::size_t last) {
          multiply(matrix, given, tokens, first, last, sums.data());
        });
      }
      for (std::size_t token = 0; token < tokens; ++token) {
        narrow(as, sums.data() + token * sums_of(matrix), sums_of(matrix), next + token * width * size);
      }
      next += sums_of(matrix) * size;
    }
  }
  Py_RETURN_NONE;
}

PyObject* quantize_states(PyObject*, PyObject* arguments) {
  PyObject *map, *values, *numbers, *scales;
  int threads;
  parse(arguments, "OOOOi", &map, &values, &numbers, &scales, &threads);
  std::vector<Memory> kept;
  const StateMap by = state_map(map, kept);
  const Memory from = in_host(values, Op::Write, 0, "values", kept);
  const std::size_t count = from.bytes / 4, blocks = (count + kStatesOfBlock - 1) / kStatesOfBlock;
  auto* const to = reinterpret_cast<std::uint8_t*>(in_host(numbers, Op::Read, count, "numbers", kept).data);
  auto* const scale = reinterpret_cast<float*>(in_host(scales, Op::Read, 4 * blocks, "scales", kept).data);
  in_blocks(count, threads, [&](std::size_t at, std::size_t length) {
    quantize_states(by, reinterpret_cast<const float*>(from.data) + at, length, to + at, scale + at / kStatesOfBlock);
  });
  Py_RETURN_NONE;
}

PyObject* expand_states(PyObject*, PyObject* arguments) {
  PyObject *map, *numbers, *scales, *out;
  int threads;
  parse(arguments, "OOOOi", &map, &numbers, &scales, &out, &threads);
  std::vector<Memory> kept;
  const StateMap by = state_map(map, kept);
  const Memory to = in_host(out, Op::Read, 0, "out", kept);
  const std::size_t count = to.bytes / 4, blocks = (count + kStatesOfBlock - 1) / kStatesOfBlock;
  const std::uint8_t* const from = bytes_of(in_host(numbers, Op::Write, count, "numbers", kept));
  const auto* const scale = reinterpret_cast<const float*>(in_host(scales, Op::Write, 4 * blocks, "scales", kept).data);
  in_blocks(count, threads, [&](std::size_t at, std::size_t length) {
    expand_states(by, from + at, scale + at / kStatesOfBlock, length, reinterpret_cast<float*>(to.data) + at);
  });
  Py_RETURN_NONE;
}

PyObject* round_states(PyObject*, PyObject* arguments) {
  PyObject *values, *out;
  unsigned long long key, first;
  int threads;
  parse(arguments, "OKKOi", &values, &key, &first, &out, &threads);
  std::vector<Memory> kept;
  const Memory from = in_host(values, Op::Write, 0, "values", kept);
  const std::size_t count = from.bytes / 4;
  auto* const to = reinterpret_cast<std::uint16_t*>(in_host(out, Op::Read, 2 * count, "out", kept).data);
  in_blocks(count, threads, [&](std::size_t at, std::size_t length) {
    round_states(reinterpret_cast<const float*>(from.data) + at, length, static_cast<std::uint32_t>(key),
                 static_cast<std::uint32_t>(first + at), to + at);
  });
  Py_RETURN_NONE;
}

}  // namespace nvme_ops
