// A device made of host memory, as torch's PrivateUse1: allocators, streams and events, and the operators that tensors
// need to be made, viewed and copied. All others are computed on the host, between a copy there and one back.
//
// A stream is the list of what was queued on it; an event is a place in such a list. Work runs, in order, when its
// stream or an event behind it is synchronised, or when a stream runs that was told to wait for such an event. So what
// a program does not wait for has not happened, every time and not only when a real device is slow. In another mode
// some of it has happened: after each call random streams run some of what they have, in an order that a real device
// may have. In a third one work takes the time that it would take on a device of given rates, in a thread of its own.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "steering.h"

namespace doubles {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kPoolStreams = 4;             // beside the default stream, 0, and those made by getNewStream
constexpr unsigned char kUnwritten = 0xEE;  // what stands where a queued copy has not arrived yet

// What a copy returns that goes wrong: it is refused; it fails when it runs, which the next wait for it tells; the
// event after it is refused.
enum : std::int64_t { kRefused = 1, kFails, kUnrecorded };

enum Kind : std::uint8_t { kDevice, kPinned };

// What a device does at once with the others, one work after another.
enum Engine : std::uint8_t { kToDevice, kFromDevice, kComputing, kEngines };

// What a test sets and sees, in the order of DeviceState in __init__.py.
struct DeviceState {
  Calls copies, allocations;     // of the device's memory; one that goes wrong finds none
  Number bytes, limit;           // of that memory: allocated now, and how many there are; 0: any number
  std::array<Number, 2> blocks;  // of each kind alive
  Number events;                 // alive
  Number pinned_memory;          // whether there is any that is page-locked
  Number copying_at_once;        // from one tensor to another of the device
  Number random;                 // the state of what chooses which work runs early; 0: none does
  // Bytes a second of each engine; 0: no work takes any time, or that of this engine does not.
  std::array<Number, kEngines> rates;
};

// A thread's device, and its stream of each, in the order of Current in __init__.py.
struct Current {
  std::int64_t device;
  std::array<std::int64_t, kDevices> streams;
};

}  // namespace doubles

extern "C" {
doubles::DeviceState pd_state;
}

namespace doubles {
namespace {

DeviceState& state = pd_state;
thread_local Current current;

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  std::function<void()> in_rows;  // copies those of two tensors that are not contiguous

  void run() const {
    if (in_rows) return in_rows();
    if (bytes > 0) std::memmove(to, from, bytes);
  }
};

using Clock = std::chrono::steady_clock;

struct Event {
  struct Stream* stream = nullptr;  // not recorded yet
  std::uint64_t position = 0;
  std::uint64_t since = 0;                     // the position of the event before
  std::shared_ptr<Clock::time_point> reached;  // when, if that is to be known
};

struct Work {
  Copy copy;
  Event wait;  // a copy where it was not recorded
  bool fails;
  Engine engine = kComputing;
  std::size_t bytes = 0;                       // that the engine moves
  Clock::time_point ends;                      // once it has begun
  Clock::time_point queued;                    // if time was kept
  std::shared_ptr<Clock::time_point> reached;  // of an event here
};

bool is_timed() {
  return std::any_of(state.rates.begin(), state.rates.end(), [](const Number& rate) { return rate != 0; });
}

std::condition_variable& queued_more = *new std::condition_variable;
std::condition_variable& ended = *new std::condition_variable;

struct Stream {
  std::deque<Work> queue;
  std::uint64_t done = 0, queued = 0;
  std::set<std::uint64_t> failed;  // the positions of copies nobody has been told of
  Event recorded;                  // the last one
  Clock::time_point until;         // when its last work ended: those who wait for it learn of it somewhat later

  void add(const Work& work) {
    queue.push_back(work);
    ++queued;
    if (!is_timed()) return;  // this may be a forked child, where the one who waits is not
    queue.back().queued = Clock::now();
    queued_more.notify_one();
  }

  void run(std::uint64_t position) {
    while (done < position) {
      if (const Event& wait = queue.front().wait; wait.stream != nullptr) wait.stream->run(wait.position);
      run_next();
    }
  }

  // Returns whether what is queued here from now on runs after a position of another stream.
  bool waits_for(const Stream& other, std::uint64_t position) const {
    std::map<const Stream*, std::uint64_t> seen;  // until where: there are more ways than there is work
    return waits_for(other, position, queued, seen);
  }

  bool waits_for(const Stream& other, std::uint64_t position, std::uint64_t before,
                 std::map<const Stream*, std::uint64_t>& seen) const {
    std::uint64_t at = done;
    const std::uint64_t known = std::exchange(seen[this], std::max(seen[this], before));
    return std::any_of(queue.begin(), queue.end(), [&](const Work& work) {
      const Event& wait = work.wait;
      return ++at > known && at <= before && wait.stream != nullptr &&
             ((wait.stream == &other && wait.position >= position) ||
              wait.stream->waits_for(other, position, wait.position, seen));
    });
  }

  void run_next() {
    const Work work = queue.front();
    queue.pop_front();
    ++done;
    if (work.reached != nullptr) *work.reached = work.ends == Clock::time_point() ? Clock::now() : work.ends;
    if (work.fails) {
      failed.insert(done);
    } else {
      work.copy.run();
    }
  }

  void wait_for(Lock& lock, std::uint64_t position, std::uint64_t since = 0) {
    if (is_timed()) queued_more.notify_one();  // this may have been queued before time was kept
    while (is_timed() && done < position) ended.wait_for(lock, std::chrono::milliseconds(10));
    run(position);  // and time may have ended meanwhile
    const auto first = failed.upper_bound(since), last = failed.upper_bound(position);
    const bool is_told = first != last;
    failed.erase(first, last);
    TORCH_CHECK(!is_told, "a copy failed on the private device");
  }
};

struct Device {
  std::deque<Stream> streams{1 + kPoolStreams};  // which stay where they are
  std::int64_t next = 0;
  std::array<Clock::time_point, kEngines> busy_until;
};

struct Block {
  Kind kind;
  std::size_t bytes;
  Stream* stream;  // in whose order it is reused
};

std::array<Device, kDevices>& devices = *new std::array<Device, kDevices>;
std::map<const char*, Block>& blocks = *new std::map<const char*, Block>;
bool unrecorded = false;  // the next event is refused

// What has been queued and done so far.
std::uint64_t all_steps() {
  std::uint64_t steps = 0;
  for (const Device& device : devices) {
    for (const Stream& stream : device.streams) steps += stream.queued + stream.done;
  }
  return steps;
}

// Begins or ends the next work of a stream; returns when that ends, or an hour from now. It takes its time from when it
// could begin, however late the thread is, and copies meanwhile, without the lock.
Clock::time_point advance(Lock& lock, Device& device, Stream& stream) {
  const auto later = Clock::now() + std::chrono::hours(1);
  if (stream.queue.empty()) return later;
  const std::uint64_t position = stream.done;
  Work& work = stream.queue.front();
  Clock::time_point ends = work.ends;
  if (ends == Clock::time_point()) {
    ends = std::max(work.queued, stream.until);
    if (const Stream* const other = work.wait.stream) {
      if (other->done < work.wait.position) return later;
      if (other->done == work.wait.position) ends = std::max(ends, other->until);
    } else if (work.reached == nullptr) {
      auto& busy = device.busy_until.at(work.engine);
      const auto rate = static_cast<double>(state.rates.at(work.engine));
      const std::chrono::duration<double> takes(rate > 0 ? static_cast<double>(work.bytes) / rate : 0);
      busy = ends = std::max(ends, busy) + std::chrono::duration_cast<Clock::duration>(takes);
    }
    work.ends = ends;
    if (const Copy copy = work.copy; copy.bytes > 0 && !work.fails) {
      lock.unlock();
      copy.run();
      lock.lock();
      if (stream.done != position) return later;  // time has ended, and others ran it
      work.copy = {};
    }
  }
  if (ends > Clock::now()) return ends;
  stream.until = ends;
  stream.run_next();
  ended.notify_all();
  return later;
}

void keep_time() {
  Lock lock(mutex);
  while (true) {
    const std::uint64_t before = all_steps();
    auto next = Clock::now() + std::chrono::hours(1);
    for (Device& device : devices) {
      for (std::size_t index = 0; is_timed() && index < device.streams.size(); ++index) {
        next = std::min(next, advance(lock, device, device.streams[index]));
      }
    }
    if (all_steps() == before) queued_more.wait_until(lock, next);  // else others may have waited for what has ended
  }
}

// Runs some of what is queued, if that is wanted, with the lock held.
void run_some() {
  if (state.random == 0) return;
  for (Device& device : devices) {
    for (Stream& stream : device.streams) {
      auto next = static_cast<std::uint64_t>(state.random.load());  // xorshift64
      next ^= next << 13;
      next ^= next >> 7;
      next ^= next << 17;
      state.random = static_cast<std::int64_t>(next);
      if (next % 2 == 0) stream.run(std::min(stream.queued, stream.done + next / 2 % 4));
    }
  }
}

Stream& stream_of(const c10::Stream& stream) {
  auto& streams = devices.at(static_cast<std::size_t>(stream.device_index())).streams;
  return streams.at(static_cast<std::size_t>(stream.id()));
}

Stream& current_stream() {
  const auto device = static_cast<std::size_t>(current.device);
  return devices.at(device).streams.at(static_cast<std::size_t>(current.streams.at(device)));
}

// Memory

std::optional<Kind> kind_of(const void* pointer) {
  const auto after = blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == blocks.begin()) return {};
  const auto& [start, block] = *std::prev(after);
  return static_cast<const char*>(pointer) < start + block.bytes ? std::optional(block.kind) : std::nullopt;
}

// What was freed in time, of each kind, by size: memory with pages, as a device has.
using Spare = std::array<std::multimap<std::size_t, void*>, 2>;
Spare& all_spare = *new Spare;

void* allocate(Kind kind, std::size_t bytes) {
  Lock lock(mutex);
  if (kind == kDevice) {
    const bool fits = state.limit == 0 || state.bytes + static_cast<std::int64_t>(bytes) <= state.limit;
    const bool fails = enter(lock, state.allocations).result != 0;
    TORCH_CHECK_WITH(OutOfMemoryError, fits && !fails, "the private device is out of memory");
    state.bytes += static_cast<std::int64_t>(bytes);
  }
  auto& spare = all_spare.at(kind);
  const auto found = is_timed() ? spare.find(bytes) : spare.end();
  void* memory = nullptr;
  if (found != spare.end()) {
    memory = found->second;
    spare.erase(found);
  } else {
    lock.unlock();
    memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, kUnwritten, bytes);
    lock.lock();
  }
  blocks[static_cast<const char*>(memory)] = {kind, bytes, &current_stream()};
  ++state.blocks.at(kind);
  return memory;
}

void release(Kind kind, void* memory) {
  if (memory == nullptr) return;
  const Lock lock(mutex);
  const auto found = blocks.find(static_cast<const char*>(memory));
  if (found == blocks.end() || found->second.kind != kind) return violation("memory is freed that was not allocated");
  const std::size_t bytes = found->second.bytes;
  for (Device& device : devices) {
    for (Stream& stream : device.streams) {
      std::uint64_t position = stream.done, last = 0;  // of a copy that the order of reuse follows
      for (Work& work : stream.queue) {
        Copy& copy = work.copy;
        ++position;
        if (!overlap(memory, bytes, copy.to, copy.bytes) && !overlap(memory, bytes, copy.from, copy.bytes)) continue;
        if (kind == kDevice && is_timed() && found->second.stream == &stream) continue;
        if (kind == kDevice && found->second.stream->waits_for(stream, position)) {
          last = position;
          continue;
        }
        violation("memory is freed that a queued copy uses");
        copy = {};  // to run it would crash
      }
      if (last != 0 && !is_timed()) stream.run(last);  // else nobody reuses the memory before
    }
  }
  blocks.erase(found);
  --state.blocks.at(kind);
  if (kind == kDevice) state.bytes -= static_cast<std::int64_t>(bytes);
  if (is_timed()) {
    all_spare.at(kind).emplace(bytes, memory);
  } else {
    std::free(memory);
  }
}

template <Kind kind>
class MemoryAllocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto index = static_cast<c10::DeviceIndex>(current.device);
    void* const memory = bytes == 0 ? nullptr : doubles::allocate(kind, bytes);
    return {memory, memory, raw_deleter(), kind == kDevice ? c10::Device(kType, index) : c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) { release(kind, memory); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

MemoryAllocator<kDevice> device_allocator;
MemoryAllocator<kPinned> pinned_allocator;

REGISTER_ALLOCATOR(kType, &device_allocator)

class Hooks final : public at::PrivateUse1HooksInterface {
public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current.device); }
  bool isPinnedPtr(const void* pointer) const override {
    const Lock lock(mutex);
    return kind_of(pointer) == kPinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(state.pinned_memory != 0, "this device has no page-locked memory");
    return &pinned_allocator;
  }
};

const bool kHooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Devices, streams and events

class Guard final : public c10::impl::DeviceGuardImplInterface {
public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current.device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no such device: ", device);
    if (device.has_index()) current.device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current.device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return stream(device, stream_now(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const Lock lock(mutex);
    return stream(device, 1 + devices.at(index_of(device)).next++ % kPoolStreams);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const Lock lock(mutex);
    auto& streams = devices.at(index_of(device)).streams;
    streams.emplace_back();
    return stream(device, static_cast<std::int64_t>(streams.size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), std::exchange(stream_now(next.device()), next.id()));
  }
  bool queryStream(const c10::Stream& queried) const override {
    const Lock lock(mutex);
    run_some();
    return stream_of(queried).queue.empty();
  }
  void synchronizeStream(const c10::Stream& waited) const override {
    Lock lock(mutex);
    stream_of(waited).wait_for(lock, stream_of(waited).queued);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(mutex);
    for (Stream& each : devices.at(static_cast<std::size_t>(device)).streams) each.wait_for(lock, each.queued);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    const Lock lock(mutex);
    if (*event == nullptr) *event = (++state.events, new Event);
    TORCH_CHECK(!std::exchange(unrecorded, false), "an event was refused by the private device");
    Stream& stream = stream_of(on);
    std::shared_ptr<Clock::time_point> reached;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      reached = std::make_shared<Clock::time_point>();
      stream.add({{}, {}, false, kComputing, 0, {}, {}, reached});
    }
    Event& last = stream.recorded;
    if (last.position != stream.queued || last.stream == nullptr) last = {&stream, stream.queued, last.position, {}};
    *static_cast<Event*>(*event) = {&stream, last.position, last.since, reached};
    run_some();
  }
  void block(void* event, const c10::Stream& waiting) const override {
    const Lock lock(mutex);
    if (is_recorded(event)) stream_of(waiting).add({{}, *static_cast<Event*>(event), false});
  }
  bool queryEvent(void* event) const override {
    const Lock lock(mutex);
    run_some();
    return !is_recorded(event) || static_cast<Event*>(event)->stream->done >= static_cast<Event*>(event)->position;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (!is_recorded(event)) return;
    const Event& waited = *static_cast<Event*>(event);
    waited.stream->wait_for(lock, waited.position, waited.since);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const Lock lock(mutex);
    const auto time = *static_cast<Event*>(second)->reached - *static_cast<Event*>(first)->reached;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) --state.events;
    delete static_cast<Event*>(event);
  }

private:
  std::size_t index_of(c10::Device device) const {
    return static_cast<std::size_t>(device.has_index() ? device.index() : current.device);
  }
  c10::Stream stream(c10::Device device, std::int64_t id) const {
    const auto index = static_cast<c10::DeviceIndex>(index_of(device));
    return c10::Stream(c10::Stream::UNSAFE, {kType, index}, id);
  }
  std::int64_t& stream_now(c10::Device device) const { return current.streams.at(index_of(device)); }
  static bool is_recorded(void* event) { return event != nullptr && static_cast<Event*>(event)->stream != nullptr; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class OnDevice {
public:
  explicit OnDevice(std::optional<c10::Device> device) : before_(current.device) {
    if (device) Guard().setDevice(*device);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { current.device = before_; }

private:
  const std::int64_t before_;
};

// Operators

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice guard(device);
  return at::detail::empty_generic(size, &device_allocator, kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, dtype.value_or(at::kFloat));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

thread_local bool computing_now = false;  // what is copied meanwhile does not move between host and device

// Returns whether what is queued reads from where a copy writes, as it may before that.
bool is_to_be_read(const Copy& copy) {
  const auto reads = [&](const Work& work) {
    const auto *from = static_cast<const char*>(work.copy.from), *to = static_cast<const char*>(copy.to);
    return from != nullptr && from < to + copy.bytes && to < from + work.copy.bytes;
  };
  return std::any_of(devices.begin(), devices.end(), [&](const Device& device) {
    return std::any_of(device.streams.begin(), device.streams.end(), [&](const Stream& stream) {
      return std::any_of(stream.queue.begin(), stream.queue.end(), reads);
    });
  });
}

void queue(Stream& stream, const Copy& copy) {
  Lock lock(mutex);
  const Fault fault = enter(lock, state.copies);
  TORCH_CHECK(fault.result != kRefused, "a copy was refused by the private device");
  unrecorded |= fault.result == kUnrecorded;
  if (kind_of(copy.to) != kDevice && !is_to_be_read(copy)) {
    std::memset(copy.to, kUnwritten, copy.bytes);  // shows that no data have come yet
  }
  const Engine engine = kind_of(copy.to) != kDevice     ? kFromDevice
                        : kind_of(copy.from) != kDevice ? kToDevice
                                                        : kComputing;
  stream.add({copy, {}, fault.result == kFails, engine, copy.bytes, {}});
  run_some();
}

// Equally shaped contiguous tensors are copied when their stream comes to it, all others at once.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (computing_now) return on_host(to).copy_(on_host(from)), to;
  const bool through_host = from.is_cpu() || to.is_cpu();
  const OnDevice guard(to.is_cpu() ? from.device() : to.device());
  const c10::Stream stream = Guard().getStream(Guard().getDevice());
  if (!through_host && from.device() != to.device()) Guard().synchronizeStream(Guard().getStream(from.device()));
  if (from.is_contiguous() && to.is_contiguous() && from.sizes() == to.sizes() &&
      from.scalar_type() == to.scalar_type()) {
    if (from.numel() > 0) queue(stream_of(stream), {to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), {}});
    if (!non_blocking && (through_host || state.copying_at_once != 0)) Guard().synchronizeStream(stream);
  } else if (is_timed() && !through_host && to.numel() > 0) {
    const auto in_rows = [to = on_host(to), from = on_host(from)] { to.copy_(from); };
    queue(stream_of(stream), {to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), in_rows});
  } else {
    Guard().synchronizeStream(stream);
    on_host(to).copy_(on_host(from));
  }
  return to;
}

at::Tensor reshaped(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
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
  library.impl("view", at::native::view);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("unfold", at::native::unfold);
}

// In time the stream is busy with it afterwards, as long as moving its arguments takes.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!is_timed() || computing_now) return at::native::cpu_fallback(op, stack);
  std::size_t bytes = 0;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor() && argument.toTensor().defined()) bytes += argument.toTensor().nbytes();
  }
  const c10::Stream stream = Guard().getStream(Guard().getDevice());
  Guard().synchronizeStream(stream);
  computing_now = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    computing_now = false;
    throw;
  }
  computing_now = false;
  const Lock lock(mutex);
  stream_of(stream).add({{}, {}, false, kComputing, bytes, {}});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace
}  // namespace doubles

extern "C" {

using namespace doubles;

Current* pd_current() {
  return &current;
}
std::int64_t pd_new_stream(c10::DeviceIndex device) {
  return Guard().getNewStream({kType, device}, 0).id();
}
void pd_keep_time() {
  std::thread(keep_time).detach();
}
bool pd_idle(c10::DeviceIndex device, std::int64_t stream) {
  return Guard().queryStream(c10::Stream(c10::Stream::UNSAFE, {kType, device}, stream));
}
bool pd_synchronize(c10::DeviceIndex device, std::int64_t stream) {
  try {
    Guard().synchronizeStream(c10::Stream(c10::Stream::UNSAFE, {kType, device}, stream));
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}
}
