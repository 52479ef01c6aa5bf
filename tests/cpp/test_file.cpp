// File: what can be opened, how it may be transferred, how it grows.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

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

UniqueFd open_fd(const std::string& path, int flags) {
  return UniqueFd(::open(path.c_str(), flags | O_CLOEXEC, 0666));
}

std::optional<Failure> opening(const std::string& path, Op op, Cache cache = Cache::Auto) {
  return check::failure_of([&] { File::open(path, op, cache); });
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

TEST(a_file_system_without_direct_io_is_served) {
  const int fd = ::memfd_create("tmpfs", MFD_CLOEXEC);
  const UniqueFd owned(fd);
  const auto file = File::adopt(fd, Op::Write, Cache::Direct);
  file->prepare(Op::Write, 0, 10, false);
  CHECK(file->buffered() >= 0, "a cached descriptor");
  CHECK_EQUAL(::pwrite(file->buffered(), "0123456789", 10, 0), ssize_t{10});
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

TEST(a_range_must_fit) {
  const std::string path = directory() / "range";
  support::write_file(path, pattern(1000, 2));
  const auto file = File::open(path, Op::Read, Cache::Auto);
  CHECK_EQUAL(file->size(), std::uint64_t{1000});
  file->prepare(Op::Read, 0, 1000, false);
  file->prepare(Op::Read, 1000, 0, false);
  const auto past = [&](std::uint64_t offset, std::uint64_t bytes) {
    return check::failure_of([&] { file->prepare(Op::Read, offset, bytes, false); });
  };
  CHECK_FAILURE(past(0, 1001), EndOfFile, 0, "has 1000 bytes");
  CHECK_FAILURE(past(1000, 1), EndOfFile, 0, "at offset 1000");
  CHECK_FAILURE(past(std::uint64_t{INT64_MAX} + 1, 1), Argument, 0, "largest file offset");
  CHECK_FAILURE(past(INT64_MAX, 1), Argument, 0, "largest file offset");
  CHECK_FAILURE(past(1, UINT64_MAX), Argument, 0, "largest file offset");
}

TEST(a_growth_that_fails_leaves_the_size) {
  const std::string path = directory() / "limited";
  support::write_file(path, pattern(100, 3));
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit tight{1 << 20, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &tight);
  const auto file = File::open(path, Op::Write, Cache::Auto);
  const auto failure = check::failure_of([&] { file->prepare(Op::Write, 0, 8 << 20, true); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  CHECK_FAILURE(failure, System, EFBIG, "making room");
  CHECK_EQUAL(size_of(path), std::uint64_t{100});
  struct stat status{};
  ::stat(path.c_str(), &status);
  CHECK(status.st_blocks * 512 < 1 << 20, "no room kept for what failed, got " << status.st_blocks * 512 << " bytes");
}

TEST(what_cannot_be_opened_says_why) {
  CHECK_FAILURE(opening(directory() / "missing", Op::Read), System, ENOENT, "opening the file to read");
  CHECK_FAILURE(opening(directory() / "no/such", Op::Write), System, ENOENT, "opening the file to write");
  CHECK_FAILURE(opening(directory() / ".", Op::Read), System, EISDIR, "");
  CHECK_FAILURE(opening(directory() / ".", Op::Read, Cache::Buffered), System, EISDIR, "");
  CHECK_FAILURE(opening(directory() / ".", Op::Write), System, EISDIR, "");
  CHECK_FAILURE(opening("/dev/zero", Op::Read), System, ESPIPE, "neither a regular file nor a block device");
  CHECK_FAILURE(opening("/dev/null", Op::Write), System, ESPIPE, "neither a regular file nor a block device");
  const auto missing = opening(directory() / "missing", Op::Read);
  CHECK(missing && missing->path == directory() / "missing", "the path with the failure");
}

TEST(a_fifo_is_refused_and_not_waited_for) {
  const std::string path = directory() / "fifo";
  CHECK_EQUAL(::mkfifo(path.c_str(), 0666), 0);
  check::finishes("opening a fifo that nobody writes", [&] {
    for (const Cache cache : {Cache::Auto, Cache::Buffered}) {
      CHECK_FAILURE(opening(path, Op::Read, cache), System, ESPIPE, "");
    }
    const auto failure = opening(path, Op::Write);
    CHECK(failure && failure->kind == Failure::Kind::System, "a failure, not " << check::described(failure));
  });
  int ends[2];
  CHECK_EQUAL(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]);
  {
    const UniqueFd closed(ends[1]);
  }
  check::finishes("adopting a pipe that nobody writes", [&] {
    CHECK_FAILURE(check::failure_of([&] { File::adopt(read_end.get(), Op::Read, Cache::Auto); }), System, ESPIPE, "");
  });
}

TEST(descriptors_must_allow_the_operation) {
  const std::string path = directory() / "adopted";
  support::write_file(path, pattern(5000, 4));
  const UniqueFd reading = open_fd(path, O_RDONLY), writing = open_fd(path, O_WRONLY), both = open_fd(path, O_RDWR);
  const auto adopting = [](int fd, Op op) { return check::failure_of([&] { File::adopt(fd, op, Cache::Auto); }); };
  CHECK_FAILURE(adopting(reading.get(), Op::Write), System, EBADF, "not open to write");
  CHECK_FAILURE(adopting(writing.get(), Op::Read), System, EBADF, "not open to read");
  for (const Op op : {Op::Read, Op::Write}) CHECK(!adopting(both.get(), op), "a descriptor for both to do");
  int closed;
  {
    const UniqueFd gone = open_fd(path, O_RDONLY);
    closed = gone.get();
  }
  CHECK_FAILURE(adopting(closed, Op::Read), System, EBADF, "file descriptor " + std::to_string(closed));
  CHECK_FAILURE(adopting(-1, Op::Read), System, EBADF, "file descriptor -1");
  CHECK(::fcntl(reading.get(), F_GETFD) >= 0, "an adopted descriptor to stay the caller's");
}

TEST(append_mode_does_not_divert_writes) {
  const std::string path = directory() / "append";
  const Bytes before = pattern(5000, 5);
  support::write_file(path, before);
  const UniqueFd appending = open_fd(path, O_WRONLY | O_APPEND);
  const auto file = File::adopt(appending.get(), Op::Write, Cache::Auto);
  CHECK_EQUAL(::pwrite(file->buffered(), "abc", 3, 100), ssize_t{3});
  Bytes expected = before;
  std::memcpy(expected.data() + 100, "abc", 3);
  CHECK(support::read_file(path) == expected, "the bytes at their offset, not at the end");
}

TEST(a_deleted_file_can_be_adopted_and_read_back) {
  const std::string path = directory() / "deleted";
  support::write_file(path, pattern(5000, 6));
  const UniqueFd fd = open_fd(path, O_RDWR);
  ::unlink(path.c_str());
  const auto file = File::adopt(fd.get(), Op::Write, Cache::Auto);
  CHECK(file->buffered() >= 0, "a second descriptor without the name");
  const auto reader = file->reader(Cache::Direct);
  CHECK_EQUAL(reader->size(), std::uint64_t{5000});
}

TEST(closing_closes_once) {
  const std::string path = directory() / "closing";
  const auto file = File::open(path, Op::Write, Cache::Auto);
  const int fd = file->buffered();
  CHECK_EQUAL(file->close(), 0);
  CHECK(::fcntl(fd, F_GETFD) < 0 && errno == EBADF, "the descriptor closed");
  CHECK_EQUAL(file->close(), 0);
}
