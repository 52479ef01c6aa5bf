// File and SharedFile: how it may be transferred, how it grows, who opens and closes it. What can be opened:
// tests/faults/test_files.py.
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "base/limits.h"
#include "check.h"
#include "engine/file.h"
#include "engine/shared_file.h"
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

bool old_kernel = false;     // tells no alignment
bool no_statx = false;       // old containers answer EPERM
unsigned other_devices = 0;  // by how many the device of a file is another one
int no_fallocate = 0;        // errno of every allocation
unsigned cuts = 0;           // calls of ftruncate()

// Returns whether the kernel tells the block size of the device that a file is on.
bool has_block_size(const std::string& path) {
  struct stat status{};
  ::stat(path.c_str(), &status);
  const std::string device = std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
  for (const char* queue : {"/queue", "/../queue"}) {
    if (::access(("/sys/dev/block/" + device + queue + "/logical_block_size").c_str(), R_OK) == 0) return true;
  }
  return false;
}

}  // namespace

// Takes the place of the C library's.
extern "C" int statx(int fd, const char* path, int flags, unsigned mask, struct statx* status) noexcept {
  if (no_statx) {
    errno = EPERM;
    return -1;
  }
  const long result = ::syscall(SYS_statx, fd, path, flags, mask, status);
  if (old_kernel) status->stx_mask &= ~0x2000U;  // STATX_DIOALIGN
  status->stx_dev_minor += other_devices;
  return static_cast<int>(result);
}

extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
  if (no_fallocate == 0) return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, length));
  errno = no_fallocate;
  return -1;
}

extern "C" int ftruncate(int fd, off_t length) noexcept {
  ++cuts;
  return static_cast<int>(::syscall(SYS_ftruncate, fd, length));
}

// Whoever extends the file between its size being read and its being cut to that size would lose what was written.
TEST(what_could_not_be_allocated_cuts_no_file_that_others_have_open) {
  const std::string path = stored("shared", pattern(5000, 1));
  const auto other = File::open(path, Op::Write, Cache::Auto);
  for (const int error : {EOPNOTSUPP, ENOSYS, EINTR, EPERM, EINVAL, ENOSPC, EDQUOT}) {
    const auto file = File::open(path, Op::Write, Cache::Auto);
    no_fallocate = error;
    cuts = 0;
    const auto failure = check::failure_of([&] { file->prepare(Op::Write, 5000, 2 * kPreallocateBytes, false); });
    no_fallocate = 0;
    CHECK(failure.has_value() == (error == ENOSPC || error == EDQUOT), "only no room is an error, not " << error);
    CHECK_EQUAL(cuts, 0U);
  }
}

TEST(blocks_are_given_back_where_nobody_else_has_the_file_open) {
  const std::string path = directory() / "alone";
  for (const bool written : {false, true}) {
    support::write_file(path, pattern(5000, 1));
    const auto file = File::open(path, Op::Write, Cache::Auto);
    if (written) file->prepare(Op::Write, 0, 100, false);  // which may be in flight, and extend the file
    no_fallocate = ENOSPC;
    cuts = 0;
    check::failure_of([&] { file->prepare(Op::Write, 5000, 2 * kPreallocateBytes, false); });
    no_fallocate = 0;
    CHECK_EQUAL(cuts, written ? 0U : 1U);
    CHECK_EQUAL(size_of(path), std::uint64_t{5000});
  }
}

TEST(a_lease_is_waited_for) {
  const std::string path = stored("leased", pattern(10, 1));
  const UniqueFd holder(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  ::fcntl(holder.get(), F_SETSIG, SIGURG);
  CHECK(::fcntl(holder.get(), F_SETLEASE, F_WRLCK) == 0, "a lease of a file that nobody else has open");
  std::thread returning([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::fcntl(holder.get(), F_SETLEASE, F_UNLCK);
  });
  CHECK_EQUAL(File::open(path, Op::Read, Cache::Auto)->size(), std::uint64_t{10});
  returning.join();
}

TEST(a_container_without_statx_has_files_too) {
  const std::string path = stored("old container", pattern(5000, 1));
  const auto known = File::open(path, Op::Write, Cache::Auto);
  no_statx = true;
  const auto file = File::open(path, Op::Write, Cache::Auto);
  no_statx = false;
  CHECK(file->size() == 5000 && file->inode() == known->inode(), "the same file, of the same size");
  CHECK(file->offset_alignment() >= known->offset_alignment(), "aligned as the device needs it at most");
}

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

TEST(an_old_kernel_is_not_asked_for_alignments) {
  const std::string path = directory() / "old";
  const auto told = File::open(path, Op::Write, Cache::Auto);
  if (!told->direct_possible() || !has_block_size(path)) return check::skipped("no block size is told in TMPDIR");
  old_kernel = true;
  const auto file = File::open(path, Op::Write, Cache::Auto);
  old_kernel = false;
  CHECK(file->direct_possible(), "direct");
  CHECK_EQUAL(file->offset_alignment(), told->offset_alignment());
}

TEST(files_of_two_devices_are_two) {
  const std::string path = directory() / "device";
  const auto one = File::open(path, Op::Write, Cache::Auto), same = File::open(path, Op::Write, Cache::Auto);
  other_devices = 1;
  const auto other = File::open(path, Op::Write, Cache::Auto);
  other_devices = 0;
  CHECK_EQUAL(one->inode(), same->inode());
  CHECK(one->inode() != other->inode(), "another one of the same number");
}

TEST(a_descriptor_is_used_only_as_it_was_opened) {
  const std::string path = stored("descriptor", pattern(10, 1));
  for (const Op op : {Op::Read, Op::Write}) {
    const UniqueFd fd(::open(path.c_str(), (op == Op::Read ? O_WRONLY : O_RDONLY) | O_CLOEXEC));
    const auto failure = check::failure_of([&] { File::adopt(fd.get(), op, Cache::Auto, 7); });
    CHECK_FAILURE(failure, System, EBADF, "file descriptor 7 is not open to");
  }
}

TEST(growing_cutting_and_holes) {
  const std::string path = stored("grown", pattern(1000, 1));
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

namespace {

struct Counted {
  std::string path = directory() / "counted";
  std::atomic<int> opened{0};
  SharedFile file{path, [this](const std::string& path) {
                    ++opened;
                    return File::open(path, Op::Write, Cache::Auto);
                  }};
};

}  // namespace

TEST(the_last_holder_closes_and_the_next_one_opens_again) {
  Counted counted;
  for (int round = 1; round <= 3; ++round) {
    const int fd = counted.file.hold().buffered();
    counted.file.hold();
    CHECK_EQUAL(counted.file.release(), 0);
    CHECK(::fcntl(fd, F_GETFD) >= 0, "open while somebody holds it");
    CHECK_EQUAL(counted.file.release(), 0);
    CHECK(::fcntl(fd, F_GETFD) < 0, "closed when nobody does");
    CHECK_EQUAL(counted.opened.load(), round);
  }
}

TEST(a_failed_opening_can_be_tried_again) {
  const std::string path = directory() / "missing";
  SharedFile file(path, [](const std::string& name) { return File::open(name, Op::Read, Cache::Auto); });
  CHECK_FAILURE(check::failure_of([&] { file.hold(); }), System, ENOENT, "opening");
  support::write_file(path, pattern(10, 1));
  CHECK_EQUAL(file.hold().size(), 10U);
  CHECK_EQUAL(file.release(), 0);
}

TEST(an_extent_is_prepared_once) {
  Counted counted;
  support::write_file(counted.path, pattern(1000, 1));
  counted.file.hold();
  bool prepared = false;
  counted.file.prepare(&prepared, Op::Write, 0, 100, true);
  CHECK(prepared, "to be told so");
  CHECK_EQUAL(std::filesystem::file_size(counted.path), 100U);
  support::write_file(counted.path, pattern(1000, 1));
  counted.file.prepare(&prepared, Op::Write, 0, 100, true);
  CHECK_EQUAL(std::filesystem::file_size(counted.path), 1000U);
  CHECK_EQUAL(counted.file.release(), 0);
}

TEST(threads_may_come_and_go) {
  Counted counted;
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        File& file = counted.file.hold();
        if (&file != &counted.file.file() ||
            ::fcntl(file.direct_possible() ? file.direct() : file.buffered(), F_GETFD) < 0)
          ++bad;
        if (counted.file.release() != 0) ++bad;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(bad.load(), 0);
}
