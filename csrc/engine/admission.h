// Lets requests that somebody waits for pass those that nobody does. A device serves what is in flight about in order,
// so a read that arrives behind a full queue of writes waits for all of them, whatever its priority: while there is
// demand, only a little of lower priority is let into flight. For all lanes of the process; takes no lock.
#pragma once

#include <cstdint>

#include "base/io.h"

namespace nvme_ops {

// False: to be asked again. What was admitted must finish. One request of lower priority is always admitted.
bool admit(Priority priority, std::uint64_t bytes) noexcept;
void finish(Priority priority, std::uint64_t bytes) noexcept;

// Requests of lower priority are told from here on that somebody is about to wait: by who submits, since the lane that
// has the others in flight may take a while to see it.
void note_demand() noexcept;

}  // namespace nvme_ops
