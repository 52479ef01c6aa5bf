// Replaces torch's CPU allocator for as long as that is wanted: large tensors get memory from the buffer pool.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

#include "base/limits.h"
#include "binding/module.h"
#include "binding/python.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {
namespace {

// What torch used before. Written once, with the GIL held, before the allocator is installed.
c10::Allocator* usual = nullptr;
std::atomic<int> uses{0};

// Takes memory of either kind, since torch knows one deleter for each allocator.
void free_any(void* memory) {
  auto* const bytes = static_cast<std::byte*>(memory);
  const bool may_be_ours = memory != nullptr && reinterpret_cast<std::uintptr_t>(memory) % kPageSize == 0;
  if (may_be_ours && BufferPool::instance().contains(bytes, 1)) {
    BufferPool::instance().release(bytes);
  } else {
    usual->raw_deleter()(memory);
  }
}

class PoolAllocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (uses.load(std::memory_order_relaxed) > 0 && bytes >= BufferPool::kLeastPart) {
      try {
        return wrapped(BufferPool::instance().allocate_closely(bytes));
      } catch (...) {  // torch's own then says that there is no memory
      }
    }
    return wrapped(usual->allocate(bytes).release_context());
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

private:
  static c10::DataPtr wrapped(void* memory) { return {memory, memory, &free_any, c10::Device(c10::DeviceType::CPU)}; }
};

// Returns whether torch's allocator is ours now. It is never replaced, since it has to free what it has allocated.
bool install() {
  if (usual != nullptr) return true;
  c10::Allocator* const current = c10::GetCPUAllocator();
  if (current->raw_deleter() == nullptr) return false;
  usual = current;
  static auto* const ours = new PoolAllocator;
  c10::SetCPUAllocator(ours);
  return c10::GetCPUAllocator() == ours;
}

}  // namespace

// An object and no pair of calls, between which Ctrl-C may come.
PyObject* pool_large_tensors(PyObject*, PyObject*) {
  if (!install()) Py_RETURN_NONE;
  PyObject* const use = PyCapsule_New(&uses, nullptr, [](PyObject*) { --uses; });
  if (use == nullptr) throw PythonError();
  ++uses;
  return use;
}

}  // namespace nvme_ops
