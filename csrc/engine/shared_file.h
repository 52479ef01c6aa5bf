// A file of a job. It is open while somebody moves its data: the first one that needs it opens it, the last one closes
// it. So submitting never waits for a file system, and a job of many files has only those open that it works on.
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

  // Opens the file if necessary. Every hold needs a release, which returns errno: some file systems report a failed
  // write only at close.
  File& hold();
  int release() noexcept;

  // Keeps the file open, once it is, until the last claim has ended: by then its name may belong to another file. Opens
  // nothing itself.
  void claim() noexcept;
  int end_claim() noexcept;  // errno, as for release

  // Call before another call uses a file that stays open between calls.
  void distrust_size() noexcept;

  // Returns the open file; only for holders.
  File& file() const { return *file_; }

  // Calls File::prepare once for each `*prepared`, however many ask.
  void prepare(bool* prepared, Op op, std::uint64_t offset, std::uint64_t bytes, bool whole);

private:
  int close_unless_needed() noexcept;

  const std::string path_;
  const Open open_;
  bool padded_ = false;
  std::mutex mutex_;
  std::atomic<unsigned> holders_{0};
  unsigned claims_ = 0;
  std::unique_ptr<File> file_;
};

// Returns the same file for reading it back with another cache mode; hold `file` whenever this one is held.
std::shared_ptr<SharedFile> reader_of(std::shared_ptr<SharedFile> file, Cache cache);

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
