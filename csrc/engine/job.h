// What a caller asked for in one call: one or many extents, moved by one or many lanes, with one outcome.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/io.h"
#include "engine/file.h"
#include "engine/outcome.h"

namespace nvme_ops {

struct Extent {
  std::shared_ptr<File> file;
  std::byte* memory;
  std::uint64_t bytes;
  std::uint64_t offset;
  bool fast_memory;  // huge or page-locked pages: worth transferring in place
};

class Job {
public:
  Job(Op op, std::vector<Extent> extents) : op_(op), extents_(std::move(extents)) {}

  Op op() const { return op_; }
  const std::vector<Extent>& extents() const { return extents_; }
  const std::shared_ptr<Outcome>& outcome() const { return outcome_; }

  // The first failure counts. What is in flight ends; nothing new is started.
  void fail(Failure failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    stopped_.store(true, std::memory_order_relaxed);
  }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  void expect_shares(std::size_t count) { shares_.store(count); }
  void end_share(std::uint64_t moved) {
    moved_.fetch_add(moved, std::memory_order_relaxed);
    if (shares_.fetch_sub(1) != 1) return;
    if (!keep_files_) close_files();
    std::optional<Failure> failure;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure = failure_;
    }
    if (failure) {
      outcome_->fail(std::move(*failure));
    } else {
      outcome_->succeed(moved_.load());
    }
  }

  // Whoever waits finds the files closed, unless it still has to read them back.
  void keep_files() { keep_files_ = true; }

private:
  void close_files() {
    for (; !extents_.empty(); extents_.pop_back()) {
      std::shared_ptr<File>& file = extents_.back().file;
      if (file.use_count() != 1) continue;
      const int error = file->close();
      if (error != 0 && op_ == Op::Write) fail(system_failure(error, "closing the file", file->path()));
    }
  }

  const Op op_;
  std::vector<Extent> extents_;
  bool keep_files_ = false;
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  std::atomic<std::size_t> shares_{0};
  std::atomic<std::uint64_t> moved_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::optional<Failure> failure_;
};

}  // namespace nvme_ops
