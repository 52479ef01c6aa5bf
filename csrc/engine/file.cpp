#include "engine/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.h"
#include "base/limits.h"

namespace nvme_ops {
namespace {

constexpr unsigned kStatxDirectAlignment = 0x2000;  // STATX_DIOALIGN, Linux 6.1

// struct statx with fields that some distributions' headers lack.
struct Status {
  struct statx base;
  std::uint32_t direct_memory_alignment() const { return word(152); }
  std::uint32_t direct_offset_alignment() const { return word(156); }

  // Takes what fstat() says, for containers that refuse statx() with EPERM. Returns whether it says anything.
  bool take_older(int fd) {
    struct stat older{};
    if (::fstat(fd, &older) < 0) return false;
    base.stx_mask = 0;
    base.stx_mode = static_cast<std::uint16_t>(older.st_mode);
    base.stx_size = static_cast<std::uint64_t>(older.st_size);
    base.stx_ino = older.st_ino;
    base.stx_blksize = static_cast<std::uint32_t>(older.st_blksize);
    base.stx_dev_major = major(older.st_dev), base.stx_dev_minor = minor(older.st_dev);
    base.stx_rdev_major = major(older.st_rdev), base.stx_rdev_minor = minor(older.st_rdev);
    return true;
  }

private:
  std::uint32_t word(std::size_t at) const {
    std::uint32_t value;
    std::memcpy(&value, reinterpret_cast<const char*>(&base) + at, sizeof value);
    return value;
  }
};
static_assert(sizeof(struct statx) == 256);

int access_mode(Op op) {
  return op == Op::Read ? O_RDONLY : O_WRONLY;
}

int open_retrying(const char* path, int flags) {
  int fd;
  do {
    fd = ::open(path, flags | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EWOULDBLOCK) flags &= ~O_NONBLOCK;  // somebody has a lease on this file: it is no pipe
  } while (fd < 0 && (errno == EINTR || errno == EWOULDBLOCK));
  return fd;
}

// Returns the device's logical block size, the most that direct I/O can require; for kernels without STATX_DIOALIGN.
std::uint64_t logical_block_size(const struct statx& status) {
  const bool device = S_ISBLK(status.stx_mode);
  const std::string number = std::to_string(device ? status.stx_rdev_major : status.stx_dev_major) + ":" +
                             std::to_string(device ? status.stx_rdev_minor : status.stx_dev_minor);
  for (const char* queue : {"/queue", "/../queue"}) {  // a disk has its own queue, a partition uses its disk's
    std::ifstream file("/sys/dev/block/" + number + queue + "/logical_block_size");
    std::uint64_t bytes = 0;
    if (file >> bytes && bytes >= 512) return bytes;
  }
  return kPageSize;
}

void require_storage(mode_t mode, const std::string& path) {
  if (S_ISDIR(mode)) raise(system_failure(EISDIR, "opening the file", path));
  if (!S_ISREG(mode) && !S_ISBLK(mode)) {
    raise(system_failure(ESPIPE, "opening what is neither a regular file nor a block device", path));
  }
}

// Frees the blocks beyond the end of the file that a failed fallocate() left: XFS frees them when a hole is punched,
// ext4 when the file is truncated to its own length. Nobody else may change that meanwhile, which a lease ensures: the
// kernel grants it where no other descriptor of the file exists. Without one the blocks stay.
void give_back(int fd, off_t from, off_t length) {
  ::fcntl(fd, F_SETSIG, SIGURG);  // ignored by default; SIGIO would end a process that somebody makes wait
  if (::fcntl(fd, F_SETLEASE, F_WRLCK) < 0) return;
  ::fcntl(fd, F_SETOWN, 0);
  struct stat status{};
  if (::fstat(fd, &status) == 0 && status.st_size <= from) {
    ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, length);
    static_cast<void>(::ftruncate(fd, status.st_size) == 0);
  }
  ::fcntl(fd, F_SETLEASE, F_UNLCK);
}

// Returns whether there is no room. Other errors only say that fallocate() cannot be used here, which costs speed.
bool no_room(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG || error == EIO;
}

bool power_of_two(std::uint64_t value) {
  return value != 0 && (value & (value - 1)) == 0;
}

}  // namespace

std::unique_ptr<File> File::reader(Cache cache) const {
  return open("/proc/self/fd/" + std::to_string(any()), Op::Read, cache, path_);
}

std::unique_ptr<File> File::open(const std::string& path, Op op, Cache cache, std::string shown) {
  std::unique_ptr<File> file(new File(std::move(shown), op, cache));
  const int flags = access_mode(op) | (op == Op::Write ? O_CREAT : 0);
  const std::string operation = std::string("opening the file to ") + name_of(op);
  // O_NONBLOCK until it is known not to be a pipe: opening that would wait for its other end.
  if (cache != Cache::Buffered) {
    file->direct_ = UniqueFd(open_retrying(path.c_str(), flags | O_NONBLOCK | O_DIRECT));
    if (!file->direct_ && errno != EINVAL && errno != EOPNOTSUPP) raise(system_failure(errno, operation, file->path_));
  }
  if (!file->direct_) {
    file->buffered_ = UniqueFd(open_retrying(path.c_str(), flags | O_NONBLOCK));
    if (!file->buffered_) raise(system_failure(errno, operation, file->path_));
  }
  file->inspect();
  ::fcntl(file->any(), F_SETFL, file->direct_ ? O_DIRECT : 0);
  return file;
}

std::unique_ptr<File> File::adopt(int fd, Op op, Cache cache, int shown) {
  const std::string called = "file descriptor " + std::to_string(shown);
  const std::string name = "/proc/self/fd/" + std::to_string(fd);
  char target[PATH_MAX];
  const ssize_t length = ::readlink(name.c_str(), target, sizeof target);
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) raise(system_failure(errno, "using " + called));
  std::unique_ptr<File> file(
      new File(length > 0 ? std::string(target, static_cast<std::size_t>(length)) : name, op, cache));
  const int mode = flags & O_ACCMODE;
  if (mode != O_RDWR && mode != access_mode(op)) {
    raise(system_failure(EBADF, called + " is not open to " + name_of(op), file->path_));
  }
  struct stat status;
  if (::fstat(fd, &status) == 0) require_storage(status.st_mode, file->path_);
  // Reopening gives us our own flags: O_DIRECT or not, and never O_APPEND, which would ignore our offsets.
  if (cache != Cache::Buffered) file->direct_ = UniqueFd(open_retrying(name.c_str(), access_mode(op) | O_DIRECT));
  if (!file->direct_) file->buffered_ = UniqueFd(open_retrying(name.c_str(), access_mode(op)));
  if (!file->direct_ && !file->buffered_) {
    if ((flags & O_APPEND) != 0 && op == Op::Write) {
      raise(bad_argument(called +
                         " is in append mode and cannot be reopened: pass its path, or open it without O_APPEND"));
    }
    UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!copy) raise(system_failure(errno, "duplicating " + called, file->path_));
    ((flags & O_DIRECT) != 0 ? file->direct_ : file->buffered_) = std::move(copy);
  }
  file->inspect();
  return file;
}

void File::inspect() {
  Status status{};
  const int fd = any();
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | kStatxDirectAlignment, &status.base) < 0 &&
      !status.take_older(fd)) {
    raise(system_failure(errno, "reading the file's status", path_));
  }
  require_storage(status.base.stx_mode, path_);
  regular_ = S_ISREG(status.base.stx_mode);
  size_ = status.base.stx_size;
  const auto [major, minor] = S_ISBLK(status.base.stx_mode)
                                  ? std::pair(status.base.stx_rdev_major, status.base.stx_rdev_minor)
                                  : std::pair(status.base.stx_dev_major, status.base.stx_dev_minor);
  inode_ = (regular_ ? status.base.stx_ino : 0) ^ (std::uint64_t{major} << 52 | std::uint64_t{minor} << 32);
  if (S_ISBLK(status.base.stx_mode)) {
    if (::ioctl(fd, BLKGETSIZE64, &size_) < 0) raise(system_failure(errno, "asking for the device's size", path_));
  }
  if (!direct_) return;
  if ((status.base.stx_mask & kStatxDirectAlignment) == 0) {
    memory_alignment_ = offset_alignment_ = logical_block_size(status.base);
    direct_possible_ = true;
  } else {
    memory_alignment_ = status.direct_memory_alignment();
    offset_alignment_ = status.direct_offset_alignment();
    direct_possible_ = power_of_two(memory_alignment_) && power_of_two(offset_alignment_) &&
                       memory_alignment_ <= kPageSize && offset_alignment_ <= kMaxEdge;
  }
  const std::uint64_t block = status.base.stx_blksize;
  edge_ = std::max({page_size(), offset_alignment_, power_of_two(block) && block <= kMaxEdge ? block : 0});
}

std::uint64_t page_size() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void check_range(std::uint64_t offset, std::uint64_t bytes) {
  if (offset > INT64_MAX || bytes > INT64_MAX - offset) {
    raise(bad_argument("file_offset=" + std::to_string(offset) + " with " + std::to_string(bytes) +
                       " bytes passes the largest file offset, " + std::to_string(INT64_MAX)));
  }
}

void File::prepare(Op op, std::uint64_t offset, std::uint64_t bytes, bool whole) {
  check_range(offset, bytes);
  const std::uint64_t end = offset + bytes;
  if (stale_.exchange(false) || end > size_) refresh_size();
  if (op == Op::Read || !regular_) {
    if (end <= size_ || bytes == 0) return;
    if (op == Op::Read) raise(end_of_file(bytes, offset, size_, path_));
    raise(transfer_failure(ENOSPC, op, bytes, offset, path_));
  }
  const std::uint64_t start = std::max(offset, size_);  // a hole before the write stays a hole
  if (end > start && end - start >= kPreallocateBytes) grow(start, end);
  if (whole && size_ > end) {
    if (::ftruncate(any(), static_cast<off_t>(end)) < 0) {
      raise(system_failure(errno, "cutting the file to " + std::to_string(end) + " bytes", path_));
    }
    size_ = end;
  }
  written_ = true;
}

void File::refresh_size() {
  struct stat status{};
  if (regular_ && ::fstat(any(), &status) == 0) {
    size_ = static_cast<std::uint64_t>(status.st_size);
  }
}

// Allocates blocks first and extends the file afterwards, so that a full disk changes nothing visible.
void File::grow(std::uint64_t start, std::uint64_t end) {
  const int fd = any();
  const auto from = static_cast<off_t>(start);
  const auto length = static_cast<off_t>(end - start);
  int error = 0;
  struct statfs disk;
  if (::fstatfs(fd, &disk) == 0 && disk.f_blocks > 0) {
    const std::uint64_t blocks = ::geteuid() == 0 ? disk.f_bfree : disk.f_bavail;
    if (blocks * static_cast<std::uint64_t>(disk.f_bsize) < end - start) error = ENOSPC;
  }
  struct rlimit largest;
  if (::getrlimit(RLIMIT_FSIZE, &largest) == 0 && end > largest.rlim_cur) error = EFBIG;
  if (error == 0 && (::fallocate(fd, FALLOC_FL_KEEP_SIZE, from, length) < 0 || ::fallocate(fd, 0, from, length) < 0)) {
    error = errno;
    // what this descriptor was already asked to write may extend the file now
    if (no_room(error) && !written_) give_back(fd, from, length);
  }
  if (error == 0) {
    size_ = end;
  } else if (no_room(error)) {
    raise(system_failure(
        error, "making room for " + std::to_string(end - start) + " bytes at offset " + std::to_string(start), path_));
  }
}

int File::buffered() {
  const std::lock_guard<std::mutex> lock(opening_);
  if (buffered_) return buffered_.get();
  // Reopens through the descriptor, since the path may name another file by now; by path if there is no /proc.
  const std::string name = "/proc/self/fd/" + std::to_string(direct_.get());
  buffered_ = UniqueFd(open_retrying(name.c_str(), access_mode(op_)));
  if (!buffered_) {
    const int error = errno;
    UniqueFd again(open_retrying(path_.c_str(), access_mode(op_)));
    struct stat ours, theirs;
    const bool same = again && ::fstat(direct_.get(), &ours) == 0 && ::fstat(again.get(), &theirs) == 0 &&
                      ours.st_dev == theirs.st_dev && ours.st_ino == theirs.st_ino;
    if (!same) raise(system_failure(error, "opening the file a second time, without O_DIRECT", path_));
    buffered_ = std::move(again);
  }
  return buffered_.get();
}

std::optional<std::uint64_t> cached_pages(int fd, std::uint64_t offset, std::uint64_t bytes) {
  constexpr long kCachestat = 451;
  struct {
    std::uint64_t offset, bytes;
  } range{offset, bytes};
  struct {
    std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } statistics{};
  if (::syscall(kCachestat, fd, &range, &statistics, 0) != 0) return {};
  return statistics.cached;
}

bool File::resident(Residency& known, std::uint64_t offset, std::uint64_t bytes, std::uint64_t end) {
  try {
    const bool covered = cachestat_works_.load(std::memory_order_relaxed) &&
                         known.covers(offset, bytes, end, [this](std::uint64_t from, std::uint64_t length) {
                           const std::uint64_t pages = (from + length - 1) / page_size() - from / page_size() + 1;
                           const auto cached = cached_pages(direct_.get(), from, length);
                           if (!cached) cachestat_works_.store(false, std::memory_order_relaxed);
                           return std::pair(cached.value_or(0), pages);
                         });
    if (cachestat_works_.load(std::memory_order_relaxed)) return covered;
    // A read that must not wait. It can start readahead if the page is missing, so it asks for one byte only.
    std::byte byte;
    iovec vector{&byte, 1};
    return ::preadv2(buffered(), &vector, 1, static_cast<off_t>(offset), RWF_NOWAIT) > 0;
  } catch (const IoError&) {  // no second descriptor: a direct read will do
    return false;
  }
}

std::uint64_t File::read_cached(const iovec* memory, int parts, std::uint64_t offset) {
  try {
    const ssize_t got = ::preadv2(buffered(), memory, parts, static_cast<off_t>(offset), RWF_NOWAIT);
    return got > 0 ? static_cast<std::uint64_t>(got) : 0;
  } catch (const IoError&) {
    return 0;
  }
}

void File::attach(void* registration, std::function<void(void*)> undo) {
  registration_ = registration;
  undo_registration_ = std::move(undo);
}

int File::close() {
  int error = 0;
  if (registration_ != nullptr) undo_registration_(std::exchange(registration_, nullptr));
  for (UniqueFd* fd : {&direct_, &buffered_}) {
    if (const int failed = fd->close()) error = failed;
  }
  return error;
}

}  // namespace nvme_ops
