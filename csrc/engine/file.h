// One open file as the engine sees it: a descriptor for direct and one for cached I/O, and the alignment of direct I/O.
#pragma once

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

// auto: reads what is in the page cache from there, all else is direct. direct: not even that. buffered: nothing is.
enum class Cache : std::uint8_t { Auto, Direct, Buffered };

class File {
public:
  // Throw IoError. A path is opened (created for Op::Write); a descriptor stays the caller's: it is reopened, or
  // duplicated where /proc does not allow that. `shown`: its name in messages.
  static std::unique_ptr<File> open(const std::string& path, Op op, Cache cache, std::string shown);
  static std::unique_ptr<File> open(const std::string& path, Op op, Cache cache) { return open(path, op, cache, path); }
  static std::unique_ptr<File> adopt(int fd, Op op, Cache cache, int shown);
  static std::unique_ptr<File> adopt(int fd, Op op, Cache cache) { return adopt(fd, op, cache, fd); }

  // Opens the same file again, to read it back.
  std::unique_ptr<File> reader(Cache cache) const;

  // Checks that reads lie inside the file, and preallocates growth, so that writes need not take turns extending it.
  // `whole`: a write that makes the file exactly that long.
  void prepare(Op op, std::uint64_t offset, std::uint64_t bytes, bool whole);

  // Notes that the file has been open for a while: its size may have changed since it was last checked.
  void distrust_size() { stale_.store(true, std::memory_order_relaxed); }

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  std::uint64_t inode() const { return inode_; }  // identifies the file, whatever its name
  Cache cache() const { return cache_; }
  bool direct_possible() const { return direct_possible_.load(std::memory_order_relaxed); }
  int direct() const { return direct_.get(); }
  int buffered();  // opened at first use; throws IoError

  // Returns whether the page cache has all of the range, in a run that ends at `end`. With cachestat it starts no I/O.
  bool resident(Residency& known, std::uint64_t offset, std::uint64_t bytes, std::uint64_t end);

  // Reads what the page cache has from `offset` on, without waiting; returns the bytes read.
  std::uint64_t read_cached(const iovec* memory, int parts, std::uint64_t offset);

  // For backends that register files: stores the backend's handle, and how to deregister it before the file is closed.
  void attach(void* registration, std::function<void(void*)> undo);
  void* registration() const { return registration_; }

  // Call when nothing is in flight any more. Returns errno: some file systems report a failed write only now.
  int close();

  std::uint64_t memory_alignment() const { return memory_alignment_; }
  std::uint64_t offset_alignment() const { return offset_alignment_; }

  // Cached and direct writes never share an aligned range of this many bytes, as the page cache works in whole pages.
  std::uint64_t edge() const { return edge_; }

  // Call when the file system accepted O_DIRECT at open but refuses the transfer: from now on everything is buffered.
  void refuse_direct() { direct_possible_.store(false, std::memory_order_relaxed); }

private:
  File(std::string path, Op op, Cache cache) : path_(std::move(path)), op_(op), cache_(cache) {}
  int any() const { return direct_ ? direct_.get() : buffered_.get(); }
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
  bool written_ = false;  // a write was prepared: one may be in flight
  std::uint64_t size_ = 0;
  std::uint64_t inode_ = 0;
  std::uint64_t memory_alignment_ = 512;
  std::uint64_t offset_alignment_ = 512;
  std::uint64_t edge_ = 4096;
};

// Throws IoError when a file cannot have `bytes` at `offset`.
void check_range(std::uint64_t offset, std::uint64_t bytes);

std::uint64_t page_size();

// Returns how many pages of a file's range are in the page cache, if the kernel tells; 0 bytes: to its end.
std::optional<std::uint64_t> cached_pages(int fd, std::uint64_t offset, std::uint64_t bytes);

}  // namespace nvme_ops
