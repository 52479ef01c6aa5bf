// Tensors on an accelerator and the way that every one can take: chunks pass through page-locked memory while storage
// and copies overlap. Only torch's device-generic interfaces are used, so no CUDA header is needed.
#pragma once

#include <cstddef>
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

  // Moves `bytes` of the tensor from `position` on, from or to `file` at `offset`; when it returns the data are in
  // place for every stream. The file is held and prepared. Throws IoError.
  virtual void bounce(Engine& engine, Op op, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
                      std::uint64_t position, std::uint64_t bytes, const Interrupted& interrupted) = 0;

  // The tensor's memory, for who moves it by other means, and the wait for what is queued on it.
  virtual std::byte* data() const = 0;
  virtual void synchronize() const = 0;

  // Compares the tensor with what the file holds. Throws IoError.
  virtual void compare(Engine& engine, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
                       const Interrupted& interrupted) = 0;
};

// Notes what is queued on the caller's current stream: every transfer comes after it. `tensor` is contiguous.
std::shared_ptr<DeviceTensor> device_tensor(c10::TensorImpl* tensor);

}  // namespace nvme_ops
