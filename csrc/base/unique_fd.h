// A file descriptor that its destructor closes; a forked child has closed it at the fork.
#pragma once

#include <errno.h>
#include <unistd.h>

#include <utility>

#include "base/fork.h"

namespace nvme_ops {

class UniqueFd {
public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd), generation_(fork_generation()) { close_at_fork(fd, true); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(generation_, other.generation_);
    return *this;
  }
  ~UniqueFd() { close(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  // Returns errno. In a forked child the number may be somebody else's by now: there it is dropped, not closed.
  int close() noexcept {
    const int fd = release();
    if (fd < 0 || generation_ != fork_generation()) return 0;
    return ::close(fd) < 0 && errno != EINTR ? errno : 0;
  }
  int release() noexcept {
    if (generation_ == fork_generation()) close_at_fork(fd_, false);
    return std::exchange(fd_, -1);
  }

private:
  int fd_ = -1;
  unsigned long generation_ = 0;
};

}  // namespace nvme_ops
