// Validates a job: reads back what it moved and compares.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine.h"

namespace nvme_ops {

// Compares every extent's memory with its file, which is read directly after a write and through the page cache after a
// read, so that the bytes take another route than before. The caller holds the files. Throws IoError: Mismatch with the
// offset of the first difference.
void validate(Engine& engine, const Job& job, const Interrupted& interrupted);

// Makes the failure for a first difference at `offset`.
Failure mismatch(std::uint64_t offset, const std::string& path);

}  // namespace nvme_ops
