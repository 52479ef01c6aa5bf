// Validates a job: reads back what it moved and compares.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"

namespace nvme_ops {

// Compares every extent's memory with its file, which is read directly after a write and through the page cache after a
// read, so that the bytes take another route than before. The caller holds the files. Throws IoError: Mismatch with the
// offset of the first difference.
void validate(Engine& engine, const Job& job, const Interrupted& interrupted);

// Reads `bytes` of an open file at `offset` into `scratch` and compares them with what is `expected`. Throws the same.
void compare_with_file(Engine& engine, const std::shared_ptr<SharedFile>& file, std::byte* scratch,
                       std::uint64_t offset, std::uint64_t bytes, const std::byte* expected,
                       const Interrupted& interrupted);

}  // namespace nvme_ops
