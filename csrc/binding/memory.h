// What a Python object lends the engine: a pointer, a size, and whatever keeps them valid.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/io.h"

namespace nvme_ops {

struct DeviceTensor;  // device_tensor.h

struct Memory {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  bool fast = false;                     // huge or page-locked pages
  std::shared_ptr<DeviceTensor> device;  // set for a tensor on an accelerator; `data` is null then
  std::shared_ptr<void> keep;            // released only with the GIL held
};

// `object` is a strided torch.Tensor or has the buffer protocol. A non-contiguous source is gathered first. May throw.
Memory memory_of(PyObject* object, Op op, const char* argument);

// The same for each tensor of a sequence, or for each row of a contiguous tensor.
std::vector<Memory> memories_of(PyObject* objects, Op op, const char* argument);

// Returns address and size of a contiguous tensor on an accelerator, without preparing a transfer.
Memory device_memory_of(PyObject* tensor, const char* argument);

// Returns whether the memory behind a CPU tensor came from the buffer pool.
bool in_pool(PyObject* tensor);

}  // namespace nvme_ops
