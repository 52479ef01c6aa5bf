// Tensors on an accelerator and the path open to all: page-locked chunks, with torch's device-generic interfaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace c10 {
struct TensorImpl;
}

namespace nvme_ops {

struct DeviceTensor;

// Records the work queued on the caller's current stream: every transfer comes after it. `tensor` is contiguous.
std::shared_ptr<DeviceTensor> device_tensor(c10::TensorImpl* tensor);

// The tensor's memory, for the other paths; and the wait for the work queued on it.
std::byte* data_of(const DeviceTensor& tensor);
void synchronize(const DeviceTensor& tensor);

// Compares the tensor with what the file holds. Throws IoError.
void compare(Engine& engine, const DeviceTensor& tensor, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
             const Interrupted& interrupted);

// `bytes` of a tensor from `position` on, and their place in a file.
struct DeviceExtent {
  std::shared_ptr<DeviceTensor> tensor;
  std::shared_ptr<SharedFile> file;
  std::uint64_t offset;
  std::uint64_t bytes;
  bool whole = false;  // a write that makes the file exactly this long
  std::uint64_t position = 0;
  bool prepared = false;  // the file is known to hold it, or has been made long enough
};

// What one call moves.
struct DeviceTransfer {
  Engine& engine;
  Op op;
  Priority priority;
  const Tool& tool;
  const std::vector<DeviceExtent>& extents;
  const Interrupted& interrupted;
};

// Moves all extents through one ring of page-locked chunks, which does not drain between them; on return the data are
// visible to every stream. Each file is open only while it is worked on. Throws IoError.
void bounce(const DeviceTransfer& transfer);

}  // namespace nvme_ops
