// The simulated device as torch's PrivateUse1: allocators, streams and events, the operators that tensors need to be
// made, viewed and copied, and plain C functions by which the tests steer and watch it.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>

#include "queue.h"

namespace private_device {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

thread_local int current_device = 0;
thread_local std::array<std::int64_t, kDevices> current_stream{};
std::atomic<bool> with_pinned{false};
std::atomic<bool> copying_at_once{false};  // from one tensor to another of the device

// The device's failures come as torch's errors, as a real device's do.
template <class Body>
auto checked(Body&& body) {
  try {
    return body();
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(false, error.what());
  }
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no such device: ", device);
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return stream(device, current(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, pool_stream(indexed(device).index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, new_stream(indexed(device).index()));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), std::exchange(current(next.device()), next.id()));
  }
  bool queryStream(const c10::Stream& queried) const override { return idle(queried.device_index(), queried.id()); }
  void synchronizeStream(const c10::Stream& waited) const override {
    checked([&] { synchronize(waited.device_index(), waited.id()); });
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    checked([&] { synchronize_device(device); });
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new_event();
    checked([&] { private_device::record(static_cast<Event*>(*event), on.device_index(), on.id()); });
  }
  void block(void* event, const c10::Stream& waiting) const override {
    private_device::block(static_cast<Event*>(event), waiting.device_index(), waiting.id());
  }
  bool queryEvent(void* event) const override { return event == nullptr || reached(static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    checked([&] { synchronize(static_cast<Event*>(event)); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) delete_event(static_cast<Event*>(event));
  }

private:
  c10::Device indexed(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream stream(c10::Device device, std::int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), id);
  }
  std::int64_t& current(c10::Device device) const {
    return current_stream.at(static_cast<std::size_t>(indexed(device).index()));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

template <Kind kind>
class MemoryAllocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device = kind == Kind::Device ? Guard().getDevice() : c10::Device(c10::kCPU);
    void* const memory = bytes == 0 ? nullptr : private_device::allocate(kind, bytes);
    return {memory, memory, raw_deleter(), device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) { private_device::release(kind, memory); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

MemoryAllocator<Kind::Device> device_allocator;
MemoryAllocator<Kind::Pinned> pinned_allocator;

REGISTER_ALLOCATOR(kType, &device_allocator)

class Hooks final : public at::PrivateUse1HooksInterface {
public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(with_pinned, "this device has no page-locked memory");
    return &pinned_allocator;
  }
};

class OnDevice {
public:
  explicit OnDevice(c10::Device device) : before_(current_device) { Guard().setDevice(device); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { current_device = before_; }

private:
  const int before_;
};

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice guard(device.value_or(Guard().getDevice()));
  return at::detail::empty_generic(size, &device_allocator, kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice guard(device.value_or(Guard().getDevice()));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, dtype.value_or(at::kFloat));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// Equally shaped contiguous tensors are copied when their stream comes to it, all others at once.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Device device = to.is_cpu() ? from.device() : to.device();
  const OnDevice guard(device);
  const std::int64_t stream = Guard().getStream(device).id();
  checked([&] {
    if (from.is_contiguous() && to.is_contiguous() && from.sizes() == to.sizes() &&
        from.scalar_type() == to.scalar_type()) {
      if (from.numel() > 0)
        queue_copy(device.index(), stream, {to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes()});
      if (!non_blocking && (from.is_cpu() || to.is_cpu() || copying_at_once)) synchronize(device.index(), stream);
    } else {
      synchronize(device.index(), stream);
      on_host(to).copy_(on_host(from));
    }
  });
  return to;
}

at::Tensor reshaped(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
}

at::Tensor view(const at::Tensor& tensor, at::IntArrayRef size) {
  return at::native::view(tensor, size);
}

at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

// Makes it a view of a storage.
at::Tensor& set_part(at::Tensor& tensor, at::Storage storage, std::int64_t offset, at::IntArrayRef size,
                     at::IntArrayRef stride) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor& set_whole(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<std::int64_t>(storage.nbytes() / tensor.element_size());
  return set_part(tensor, std::move(storage), 0, {count}, {1});
}

// What is returned through an argument may have no memory yet.
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    at::Tensor resized = to;
    const at::Tensor made = empty(from.sizes(), to.scalar_type(), {}, to.device(), {}, {});
    set_part(resized, made.storage(), 0, made.sizes(), made.strides());
  }
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_reshape_alias", reshaped);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
}

// All others are computed on the host, between a copy there and one back.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace
}  // namespace private_device

extern "C" {

using namespace private_device;

void pd_start() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
int pd_device() {
  return current_device;
}
void pd_set_device(int device) {
  current_device = device;
}
std::int64_t pd_stream(int device) {
  return current_stream.at(static_cast<std::size_t>(device));
}
void pd_set_stream(int device, std::int64_t stream) {
  current_stream.at(static_cast<std::size_t>(device)) = stream;
}
std::int64_t pd_new_stream(int device) {
  return new_stream(device);
}
int pd_idle(int device, std::int64_t stream) {
  return idle(device, stream) ? 1 : 0;
}
int pd_synchronize(int device, std::int64_t stream) {
  try {
    synchronize(device, stream);
    return 0;
  } catch (const std::runtime_error&) {
    return -1;
  }
}
void pd_set_pinned(int available) {
  with_pinned = available != 0;
}
void pd_set_copying_at_once(int now) {
  copying_at_once = now != 0;
}
void pd_fail_copy(int fault, int skipped) {
  fail_copy(static_cast<Fault>(fault), skipped);
}
void pd_hold(int held) {
  hold(held != 0);
}
int pd_held_up() {
  return held_up();
}
void pd_statistics(Statistics* into) {
  *into = statistics();
}
}
