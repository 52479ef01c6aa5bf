#include "engine/shared_file.h"

namespace nvme_ops {

File& SharedFile::hold() {
  unsigned holders = holders_.load(std::memory_order_relaxed);
  while (holders > 0) {
    if (holders_.compare_exchange_weak(holders, holders + 1, std::memory_order_acquire)) return *file_;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!file_) file_ = open_(path_);
  holders_.fetch_add(1, std::memory_order_release);
  return *file_;
}

int SharedFile::release() noexcept {
  if (holders_.fetch_sub(1, std::memory_order_acq_rel) > 1) return 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  return close_unless_needed();
}

void SharedFile::claim() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++claims_;
}

int SharedFile::end_claim() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  --claims_;
  return close_unless_needed();
}

void SharedFile::distrust_size() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (file_) file_->distrust_size();
}

int SharedFile::close_unless_needed() noexcept {
  // It may be held again by now, or have been closed by another thread.
  if (holders_.load(std::memory_order_acquire) > 0 || claims_ > 0 || !file_) return 0;
  const int error = file_->close();
  file_.reset();
  return error;
}

void SharedFile::prepare(bool* prepared, Op op, std::uint64_t offset, std::uint64_t bytes, bool whole) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (*prepared) return;
  file_->prepare(op, offset, bytes, whole);
  *prepared = true;
}

std::shared_ptr<SharedFile> reader_of(std::shared_ptr<SharedFile> file, Cache cache) {
  std::string path = file->file().path();
  return std::make_shared<SharedFile>(
      std::move(path), [file = std::move(file), cache](const std::string&) { return file->file().reader(cache); });
}

}  // namespace nvme_ops
