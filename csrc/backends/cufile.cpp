// Requests on GPU memory as a backend, and the CUDA context in which cuFile needs to be called.
#include <dlfcn.h>
#include <errno.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "backends/cufile_driver.h"
#include "base/error.h"
#include "base/symbol.h"

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
    CudaDriver table;
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return table;
    table.usable = find_symbol(library, "cuPointerGetAttribute", &table.pointer_attribute) &&
                   find_symbol(library, "cuCtxGetCurrent", &table.current) &&
                   find_symbol(library, "cuCtxSetCurrent", &table.make_current) &&
                   find_symbol(library, "cuDevicePrimaryCtxRetain", &table.retain_primary);
    return table;
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

// Returns null for memory that is not CUDA's. Mapped virtual memory belongs to no context but the primary one.
void* owner(const CudaDriver& driver, const void* memory) {
  const auto pointer = reinterpret_cast<std::uintptr_t>(memory);
  void* context = nullptr;
  if (driver.pointer_attribute(&context, CudaDriver::kContext, pointer) == 0 && context != nullptr) return context;
  int device = -1;
  if (driver.pointer_attribute(&device, CudaDriver::kOrdinal, pointer) != 0 || device < 0) return nullptr;
  return primary_context(driver, device);
}

// Makes the CUDA context that owns a pointer current for the length of a scope; nothing for other memory.
class CudaContextOf {
public:
  explicit CudaContextOf(const void* memory) {
    const CudaDriver& driver = cuda_driver();
    if (!driver.usable) return;
    void* const wanted = owner(driver, memory);
    if (wanted == nullptr || driver.current(&before_) != 0 || before_ == wanted) return;
    changed_ = driver.make_current(wanted) == 0;
  }
  CudaContextOf(const CudaContextOf&) = delete;
  CudaContextOf& operator=(const CudaContextOf&) = delete;
  ~CudaContextOf() {
    if (changed_) cuda_driver().make_current(before_);
  }

private:
  void* before_ = nullptr;
  bool changed_ = false;
};

// cuFile's calls block, so a queue has one request at a time: there are as many in flight as lanes.
class CuFileQueue final : public Queue {
public:
  explicit CuFileQueue(const CuFileDriver& driver) : driver_(driver) {}

  std::size_t submit(const Request* requests, std::size_t count) override {
    if (answer_ || count == 0) return 0;
    answer_ = {requests->token, transfer(*requests)};
    return 1;
  }

  std::size_t reap(Completion* completions, std::size_t most, std::size_t, std::chrono::milliseconds) override {
    if (most == 0 || !answer_) return 0;
    *completions = *std::exchange(answer_, std::nullopt);
    return 1;
  }

  bool may_be_bypassed() const override { return false; }

private:
  std::int64_t transfer(const Request& request) const {
    const CudaContextOf context(request.data);
    const auto offset = static_cast<off_t>(request.offset);
    const CuFileApi& api = driver_.api();
    errno = 0;
    const ssize_t moved = request.op == Op::Read ? api.read(request.file, request.data, request.bytes, offset, 0)
                                                 : api.write(request.file, request.data, request.bytes, offset, 0);
    if (moved >= 0) return moved;
    return moved == -1 ? -(errno != 0 ? errno : EIO) : moved;  // -1: errno; below: cuFile's own code, negated
  }

  const CuFileDriver& driver_;
  std::optional<Completion> answer_;
};

std::unique_ptr<Queue> open_cufile(const QueueOptions&) {
  const CuFileDriver* const driver = CuFileDriver::current();
  if (driver == nullptr) raise(unavailable("cuFile's driver is not open"));
  return std::make_unique<CuFileQueue>(*driver);
}

}  // namespace

const Backend kCuFile{"cufile", [] { return Probe{CuFileDriver::current() != nullptr, "its driver is not open"}; },
                      open_cufile};

}  // namespace nvme_ops
