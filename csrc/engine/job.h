// A transfer inside the engine: one or many extents, moved by one or many lanes, with one outcome.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/io.h"
#include "engine/outcome.h"
#include "engine/population.h"
#include "engine/shared_file.h"
#include "engine/spans.h"
#include "engine/tool.h"

namespace nvme_ops {

struct Extent {
  std::shared_ptr<SharedFile> file;
  std::byte* memory;
  std::uint64_t bytes;
  std::uint64_t offset;
  bool fast_memory;                              // in huge or page-locked pages: worth transferring in place
  bool whole = false;                            // a write that makes the file exactly this long
  bool prepared = false;                         // the file is known to hold it, or has been made long enough
  bool device = false;                           // memory of an accelerator: nothing here may touch it
  std::shared_ptr<const Spans> spans = nullptr;  // instead of `memory`
};

class Job {
public:
  Job(Op op, std::vector<Extent> extents, Priority priority = Priority::Demand, const Tool& tool = {})
      : op_(op), priority_(priority), tool_(tool), extents_(std::move(extents)) {}

  Op op() const { return op_; }
  Priority priority() const { return priority_; }
  const Tool& tool() const { return tool_; }
  const std::vector<Extent>& extents() const { return extents_; }
  const std::shared_ptr<Outcome>& outcome() const { return outcome_; }
  std::uint64_t bytes() const {  // of its extents
    std::uint64_t sum = 0;
    for (const Extent& extent : extents_) sum += extent.bytes;
    return sum;
  }

  // Sets the population of memory that a read is to fill: no piece is planned before it has its pages.
  void await(std::shared_ptr<const Population> population) { population_ = std::move(population); }
  bool populated(std::size_t extent, std::uint64_t position, std::uint64_t bytes) const {
    if (!population_) return true;
    const Extent& wanted = extents_[extent];
    if (!wanted.spans) return population_->reached(wanted.memory + position, bytes);
    for (const std::uint64_t end = position + bytes; position < end;) {
      const Span part = wanted.spans->at(position, end - position);
      if (!population_->reached(part.memory, part.bytes)) return false;
      position += part.bytes;
    }
    return true;
  }

  // Called by a lane that holds the extent's file before its first piece; does its work only once. Throws IoError.
  void prepare(std::size_t extent) {
    Extent& wanted = extents_[extent];
    wanted.file->prepare(&wanted.prepared, op_, wanted.offset, wanted.bytes, wanted.whole);
  }

  // Records the first failure. What is in flight ends; nothing new is started.
  void fail(Failure failure) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    stopped_.store(true, std::memory_order_relaxed);
  }
  // Some file systems report a failed write only when the file is closed.
  void note_closed(const SharedFile& file, int error) noexcept {
    if (error == 0 || op_ == Op::Read) return;
    try {
      fail(system_failure(error, "closing the file", file.path()));
    } catch (...) {
      fail(current_failure());
    }
  }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  void expect_shares(std::size_t count) { shares_.store(count); }
  void end_share(std::uint64_t moved) noexcept {
    moved_.fetch_add(moved, std::memory_order_relaxed);
    if (shares_.fetch_sub(1) != 1) return;
    population_ = nullptr;
    if (!keep_extents_) extents_ = {};  // closes the files before anyone is notified
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

  // Bytes that were found in the page cache.
  void note_cached(std::uint64_t bytes) noexcept { cached_.fetch_add(bytes, std::memory_order_relaxed); }
  std::uint64_t cached() const { return cached_.load(std::memory_order_relaxed); }

  // Keeps the extents after the end, for reading them back.
  void keep_extents() { keep_extents_ = true; }

private:
  const Op op_;
  const Priority priority_;
  const Tool tool_;
  std::vector<Extent> extents_;
  std::shared_ptr<const Population> population_;
  bool keep_extents_ = false;
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  std::atomic<std::size_t> shares_{0};
  std::atomic<std::uint64_t> moved_{0}, cached_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::optional<Failure> failure_;
};

}  // namespace nvme_ops
