// Reads back what a job moved and compares.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine.h"

namespace nvme_ops {

// Every extent's memory against its file, read past the page cache after a write and through it after a read, so that
// the comparison takes another way than the transfer. The caller holds the files. Throws IoError: Mismatch with the
// offset of the first difference.
void validate(Engine& engine, const Job& job, const Interrupted& interrupted);

// The first difference is at `offset` of the file.
Failure mismatch(std::uint64_t offset, const std::string& path);

}  // namespace nvme_ops
