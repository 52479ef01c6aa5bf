// Tells a process from its parent. Threads and rings do not survive a fork; what owns them compares generations.
#pragma once

namespace nvme_ops {

// How many forks lie between this process and the one that loaded the op.
unsigned long fork_generation() noexcept;

}  // namespace nvme_ops
