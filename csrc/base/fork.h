// Tells a process from its parent. Threads and rings do not survive a fork; what owns them compares generations.
#pragma once

namespace nvme_ops {

// How many forks lie between this process and the one that loaded the op.
unsigned long fork_generation() noexcept;

// The child of a fork closes the descriptors that are marked so, before the program goes on: a daemon that closes all
// descriptors and opens its own must not find a number of ours used for one of them. No lock, no allocation.
void close_at_fork(int fd, bool close) noexcept;

}  // namespace nvme_ops
