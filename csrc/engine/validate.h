// Reads back what a job moved and compares.
#pragma once

#include "engine/engine.h"

namespace nvme_ops {

// Every extent's memory against its file, read past the page cache after a write and through it after a read, so that
// the comparison takes another way than the transfer. Throws IoError: Mismatch with the offset of the first difference.
void validate(Engine& engine, const Job& job, const Interrupted& interrupted);

}  // namespace nvme_ops
