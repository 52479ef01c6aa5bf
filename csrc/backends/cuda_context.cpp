#include "backends/cuda_context.h"

#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>

namespace nvme_ops {
namespace {

// Names, numbers and types of CUDA's driver API.
struct CudaDriver {
  static constexpr int kContext = 1;  // CU_POINTER_ATTRIBUTE_CONTEXT
  static constexpr int kOrdinal = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

  int (*pointer_attribute)(void* value, int attribute, std::uintptr_t pointer) = nullptr;
  int (*current)(void** context) = nullptr;
  int (*make_current)(void* context) = nullptr;
  int (*retain_primary)(void** context, int device) = nullptr;
  bool usable = false;
};

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = [] {
    CudaDriver found;
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return found;
    const auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(::dlsym(library, name));
      return *function != nullptr;
    };
    found.usable = find("cuPointerGetAttribute", &found.pointer_attribute) && find("cuCtxGetCurrent", &found.current) &&
                   find("cuCtxSetCurrent", &found.make_current) &&
                   find("cuDevicePrimaryCtxRetain", &found.retain_primary);
    return found;
  }();
  return driver;
}

// Retained once and never released: torch's own reference lasts as long as the process.
void* primary_context(const CudaDriver& driver, int device) {
  static std::mutex mutex;
  static std::map<int, void*> contexts;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& context = contexts[device];
  if (context == nullptr && driver.retain_primary(&context, device) != 0) context = nullptr;
  return context;
}

// Returns null for memory that is not CUDA's. Mapped virtual memory belongs to no context: torch uses its device's
// primary one.
void* owner(const CudaDriver& driver, const void* memory) {
  const auto pointer = reinterpret_cast<std::uintptr_t>(memory);
  void* context = nullptr;
  if (driver.pointer_attribute(&context, CudaDriver::kContext, pointer) == 0 && context != nullptr) return context;
  int device = -1;
  if (driver.pointer_attribute(&device, CudaDriver::kOrdinal, pointer) != 0 || device < 0) return nullptr;
  return primary_context(driver, device);
}

}  // namespace

CudaContextOf::CudaContextOf(const void* memory) {
  const CudaDriver& driver = cuda_driver();
  if (!driver.usable) return;
  void* const wanted = owner(driver, memory);
  if (wanted == nullptr || driver.current(&before_) != 0 || before_ == wanted) return;
  changed_ = driver.make_current(wanted) == 0;
}

CudaContextOf::~CudaContextOf() {
  if (changed_) cuda_driver().make_current(before_);
}

}  // namespace nvme_ops
