// A file of a job, open while somebody moves its data: submitting never waits for a file system, and of many files only
// those are open that are worked on.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/file.h"

namespace nvme_ops {

class SharedFile {
public:
  using Open = std::function<std::unique_ptr<File>(const std::string& path)>;  // throws IoError

  // `path`: its name in messages while it is closed, and the argument of `open`.
  SharedFile(std::string path, Open open) : path_(std::move(path)), open_(std::move(open)) {}

  const std::string& path() const { return path_; }

  // Lets writes overwrite what follows them up to the next edge. Call before the first transfer.
  void pad() noexcept { padded_ = true; }
  bool padded() const { return padded_; }

  // Opens the file if necessary. Every hold needs a release, which returns errno: some report a failed write at close.
  File& hold() {
    unsigned holders = holders_.load(std::memory_order_relaxed);
    while (holders > 0) {
      if (holders_.compare_exchange_weak(holders, holders + 1, std::memory_order_acquire)) return *file_;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!file_) file_ = open_(path_);
    holders_.fetch_add(1, std::memory_order_release);
    return *file_;
  }
  int release() noexcept {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) > 1) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    return close_unless_needed();
  }

  // Keeps the file open, once it is, until the last claim has ended: by then its name may belong to another file.
  void claim() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++claims_;
  }
  int end_claim() noexcept {  // errno, as for release
    const std::lock_guard<std::mutex> lock(mutex_);
    --claims_;
    return close_unless_needed();
  }

  // Call before another call uses a file that stays open between calls.
  void distrust_size() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (file_) file_->distrust_size();
  }

  // Returns the open file; only for holders.
  File& file() const { return *file_; }

  // Calls File::prepare once for each `*prepared`, however many ask.
  void prepare(bool* prepared, Op op, std::uint64_t offset, std::uint64_t bytes, bool whole) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (*prepared) return;
    file_->prepare(op, offset, bytes, whole);
    *prepared = true;
  }

private:
  int close_unless_needed() noexcept {
    // It may be held again by now, or have been closed by another thread.
    if (holders_.load(std::memory_order_acquire) > 0 || claims_ > 0 || !file_) return 0;
    const int error = file_->close();
    file_.reset();
    return error;
  }

  const std::string path_;
  const Open open_;
  bool padded_ = false;
  std::mutex mutex_;
  std::atomic<unsigned> holders_{0};
  unsigned claims_ = 0;
  std::unique_ptr<File> file_;
};

// Returns the same file for reading it back with another cache mode; hold `file` whenever this one is held.
inline std::shared_ptr<SharedFile> reader_of(std::shared_ptr<SharedFile> file, Cache cache) {
  std::string path = file->file().path();
  return std::make_shared<SharedFile>(
      std::move(path), [file = std::move(file), cache](const std::string&) { return file->file().reader(cache); });
}

// Holds a file until the end of a scope.
class FileHold {
public:
  explicit FileHold(std::shared_ptr<SharedFile> file) : file_(std::move(file)) { file_->hold(); }
  FileHold(const FileHold&) = delete;
  FileHold& operator=(const FileHold&) = delete;
  ~FileHold() { end(); }

  int end() { return std::exchange(holds_, false) ? file_->release() : 0; }
  // The same; throws IoError where closing the file reports that a write has failed.
  void end_after(Op op) {
    if (const int error = end(); error != 0 && op == Op::Write)
      raise(system_failure(error, "closing the file", path()));
  }
  const std::string& path() const { return file_->path(); }

private:
  const std::shared_ptr<SharedFile> file_;
  bool holds_ = true;
};

}  // namespace nvme_ops
