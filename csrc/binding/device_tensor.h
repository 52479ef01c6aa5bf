// Tensors on an accelerator: chunks pass through page-locked memory while storage and copies overlap. Only torch's
// device-generic interfaces are used, so no CUDA header is needed.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"

namespace c10 {
struct TensorImpl;
}

namespace nvme_ops {

class DeviceTensor {
public:
  virtual ~DeviceTensor() = default;

  // Moves the whole tensor from or to `file`; when it returns the data are in place for every stream. Throws IoError.
  virtual void transfer(Engine& engine, Op op, const std::shared_ptr<File>& file, std::uint64_t offset,
                        const Interrupted& interrupted) = 0;

  // Compares the tensor with what the file holds. Throws IoError.
  virtual void compare(Engine& engine, const std::shared_ptr<File>& file, std::uint64_t offset,
                       const Interrupted& interrupted) = 0;
};

// Notes what is queued on the caller's current stream: every transfer comes after it. `tensor` is contiguous.
std::shared_ptr<DeviceTensor> device_tensor(c10::TensorImpl* tensor);

}  // namespace nvme_ops
