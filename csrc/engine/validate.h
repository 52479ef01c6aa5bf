// Validates a job: reads back what it moved and compares.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"

namespace nvme_ops {

// Compares every extent's memory with its file, read by another route than before: directly after a write. The caller
// holds the files. Throws IoError: Mismatch with the first difference's offset.
void validate(Engine& engine, const Job& job, const Interrupted& interrupted);

// Reads `bytes` of an open file at `offset` into `scratch` and compares them with what is `expected`. Throws the same.
void compare_with_file(Engine& engine, const std::shared_ptr<SharedFile>& file, std::byte* scratch,
                       std::uint64_t offset, std::uint64_t bytes, const std::byte* expected,
                       const Interrupted& interrupted);

}  // namespace nvme_ops
