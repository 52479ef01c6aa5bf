// Distinguishes a process from its parent. Threads and rings do not survive a fork; their owners compare generations.
#pragma once

namespace nvme_ops {

// Returns how many forks lie between this process and the one that loaded the op.
unsigned long fork_generation() noexcept;

// Marks a descriptor to be closed in a forked child before the program goes on: a daemon that closes all descriptors
// and opens its own must not get a number that we still use. Takes no lock and allocates nothing.
void close_at_fork(int fd, bool close) noexcept;

}  // namespace nvme_ops
