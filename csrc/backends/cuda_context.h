// Makes the CUDA context that owns a pointer current for the length of a scope, through the CUDA driver found at run
// time. Does nothing for other memory.
#pragma once

namespace nvme_ops {

class CudaContextOf {
public:
  explicit CudaContextOf(const void* memory);
  CudaContextOf(const CudaContextOf&) = delete;
  CudaContextOf& operator=(const CudaContextOf&) = delete;
  ~CudaContextOf();

private:
  void* before_ = nullptr;
  bool changed_ = false;
};

}  // namespace nvme_ops
