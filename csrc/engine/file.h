// One open file as the engine sees it: a descriptor for direct and one for cached I/O, and what direct I/O asks.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/io.h"
#include "base/unique_fd.h"
#include "engine/residency.h"

namespace nvme_ops {

// auto: what is in the page cache is read from it, everything else goes direct. direct: never read from the cache.
// buffered: everything through the cache.
enum class Cache : std::uint8_t { Auto, Direct, Buffered };

class File {
public:
  // Throw IoError. A path is opened (created for Op::Write); a descriptor stays the caller's: it is reopened, or
  // duplicated where /proc does not allow that. `shown`: what messages call it.
  static std::unique_ptr<File> open(const std::string& path, Op op, Cache cache, std::string shown);
  static std::unique_ptr<File> open(const std::string& path, Op op, Cache cache) { return open(path, op, cache, path); }
  static std::unique_ptr<File> adopt(int fd, Op op, Cache cache, int shown);
  static std::unique_ptr<File> adopt(int fd, Op op, Cache cache) { return adopt(fd, op, cache, fd); }

  // The same file, opened again to read it back.
  std::unique_ptr<File> reader(Cache cache) const;

  // Checks that `bytes` at `offset` can be transferred: reads must lie inside the file. `whole`: a write that makes the
  // file exactly that long. Growth is preallocated, so that writes need not take turns extending the file.
  void prepare(Op op, std::uint64_t offset, std::uint64_t bytes, bool whole);

  // It has been open for a while: others may have cut or lengthened it since it was last looked at.
  void distrust_size() { stale_.store(true, std::memory_order_relaxed); }

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  std::uint64_t inode() const { return inode_; }  // stands for the file, whatever its name
  Cache cache() const { return cache_; }
  bool direct_possible() const { return direct_possible_.load(std::memory_order_relaxed); }
  int direct() const { return direct_.get(); }
  int buffered();  // opened at first use; throws IoError

  // Whether the page cache has all of the range, which lies in a run that ends at `end`. Never starts I/O on a kernel
  // that can tell (cachestat, Linux 6.5).
  bool resident(Residency& known, std::uint64_t offset, std::uint64_t bytes, std::uint64_t end);

  // Reads what the page cache has from `offset` on, without waiting. Returns bytes.
  std::uint64_t read_cached(const iovec* memory, int parts, std::uint64_t offset);

  // For a backend that registers files: what it knows this one as, and how to undo that before the file is closed.
  void attach(void* registration, std::function<void(void*)> undo);
  void* registration() const { return registration_; }

  // When nothing is in flight any more. Returns errno: some file systems report a failed write no earlier.
  int close();

  std::uint64_t memory_alignment() const { return memory_alignment_; }
  std::uint64_t offset_alignment() const { return offset_alignment_; }

  // Cached and direct writes never share an aligned range of this many bytes: the cache works in whole pages.
  std::uint64_t edge() const { return edge_; }

  // The file system took O_DIRECT at open and refuses the transfer: everything goes through the cache from now on.
  void refuse_direct() { direct_possible_.store(false, std::memory_order_relaxed); }

private:
  File(std::string path, Op op, Cache cache) : path_(std::move(path)), op_(op), cache_(cache) {}
  void inspect();
  void refresh_size();
  void grow(std::uint64_t start, std::uint64_t end);

  const std::string path_;
  const Op op_;
  const Cache cache_;
  UniqueFd direct_, buffered_;
  void* registration_ = nullptr;
  std::function<void(void*)> undo_registration_;
  std::mutex opening_;
  std::atomic<bool> direct_possible_{false};
  std::atomic<bool> cachestat_works_{true}, stale_{false};
  bool regular_ = true;
  std::uint64_t size_ = 0;
  std::uint64_t inode_ = 0;
  std::uint64_t memory_alignment_ = 512;
  std::uint64_t offset_alignment_ = 512;
  std::uint64_t edge_ = 4096;
};

// Throws IoError when a file cannot have `bytes` at `offset`.
void check_range(std::uint64_t offset, std::uint64_t bytes);

std::uint64_t page_size();

// How many pages of a file's range lie in the page cache; 0 bytes stand for all up to its end. Nothing where the kernel
// does not tell: older than Linux 6.5, or a file that is neither ours nor ours to write.
std::optional<std::uint64_t> cached_pages(int fd, std::uint64_t offset, std::uint64_t bytes);

}  // namespace nvme_ops
