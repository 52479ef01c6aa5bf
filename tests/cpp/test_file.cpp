// File: how it may be transferred, how it grows. What can be opened: tests/faults/test_files.py.
#include "base/limits.h"
#include "check.h"
#include "engine/file.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

std::uint64_t size_of(const std::string& path) {
  return std::filesystem::file_size(path);
}

bool power_of_two(std::uint64_t value) {
  return value != 0 && (value & (value - 1)) == 0;
}

}  // namespace

TEST(alignments_are_powers_of_two_and_edges_hold_them) {
  for (const Cache cache : {Cache::Auto, Cache::Direct, Cache::Buffered}) {
    const auto file = File::open(directory() / "aligned", Op::Write, cache);
    CHECK(power_of_two(file->memory_alignment()), "a power of two, got " << file->memory_alignment());
    CHECK(power_of_two(file->offset_alignment()), "a power of two, got " << file->offset_alignment());
    CHECK(power_of_two(file->edge()) && file->edge() >= kPageSize && file->edge() % file->offset_alignment() == 0,
          "whole pages and sectors, got " << file->edge());
    if (cache == Cache::Buffered) CHECK(!file->direct_possible() && file->direct() < 0, "nothing direct");
    CHECK(file->buffered() >= 0, "a cached descriptor");
    file->refuse_direct();
    CHECK(!file->direct_possible(), "nothing direct once it was refused");
  }
}

TEST(growing_cutting_and_holes) {
  const std::string path = directory() / "grown";
  support::write_file(path, pattern(1000, 1));
  File::open(path, Op::Write, Cache::Auto)->prepare(Op::Write, 100, 10, false);
  CHECK_EQUAL(size_of(path), std::uint64_t{1000});
  File::open(path, Op::Write, Cache::Auto)->prepare(Op::Write, 0, 10, true);
  CHECK_EQUAL(size_of(path), std::uint64_t{10});
  File::open(path, Op::Write, Cache::Auto)->prepare(Op::Write, 0, 0, true);
  CHECK_EQUAL(size_of(path), std::uint64_t{0});
  const auto large = File::open(path, Op::Write, Cache::Auto);
  large->prepare(Op::Write, 5 << 20, kPreallocateBytes, false);
  CHECK(size_of(path) == 0 || size_of(path) == (5 << 20) + kPreallocateBytes, "preallocation up to the end, or none");
  CHECK_EQUAL(large->size(), size_of(path));
}

TEST(closing_closes_once) {
  const std::string path = directory() / "closing";
  const auto file = File::open(path, Op::Write, Cache::Auto);
  const int fd = file->buffered();
  CHECK_EQUAL(file->close(), 0);
  CHECK(::fcntl(fd, F_GETFD) < 0 && errno == EBADF, "the descriptor closed");
  CHECK_EQUAL(file->close(), 0);
}
