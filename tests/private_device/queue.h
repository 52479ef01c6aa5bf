// The simulated device without torch: its memory, and streams that run nothing before somebody waits for them.
//
// A stream is the list of what was queued on it; an event is a place in such a list. Work runs, in order, when its
// stream or an event behind it is synchronised, or when a stream runs that was told to wait for such an event. So what
// a program does not wait for has not happened, every time and not only when a real device is slow.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

namespace private_device {

constexpr int kDevices = 2;
constexpr int kPoolStreams = 4;             // beside the default stream, 0, and those made by new_stream
constexpr unsigned char kUnwritten = 0xEE;  // what stands where a queued copy has not arrived yet

enum class Kind : std::uint8_t { Device, Pinned };

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

// Lets a copy fail after `skipped` more of them: when it is queued; when it runs, which the next wait for it tells; or
// lets the event after it fail to be recorded. None: nothing fails.
enum class Fault : std::uint8_t { None, Queue, Run, Record };

struct Statistics {
  std::int64_t device_blocks, pinned_blocks, events, copies, violations;
};

struct Event {
  int device = -1;  // not recorded yet
  std::int64_t stream = 0;
  std::uint64_t position = 0;
};

namespace {

struct Work {
  Copy copy;
  Event wait;  // a copy where it was not recorded
  bool fails;
};

struct Stream {
  std::deque<Work> queue;
  std::uint64_t done = 0, queued = 0;
  std::uint64_t failed_at = 0;  // the position of a failed copy nobody has been told of
};

struct Block {
  Kind kind;
  std::size_t bytes;
};

struct Device {
  std::vector<Stream> streams{1 + kPoolStreams};
  std::int64_t next = 0;
};

struct State {
  std::mutex mutex;
  std::array<Device, kDevices> devices;
  std::map<const char*, Block> blocks;
  std::int64_t events = 0, copies = 0, violations = 0;
  Fault fault = Fault::None;
  int until_fault = 0;  // copies that still go well
  bool held = false;
  int held_up = 0;
  std::condition_variable let_go;
};

State& state() {
  static State* const only = new State;  // never destroyed: tensors may outlive everything
  return *only;
}

using Lock = std::lock_guard<std::mutex>;

Stream& stream_of(int device, std::int64_t stream) {
  return state().devices.at(static_cast<std::size_t>(device)).streams.at(static_cast<std::size_t>(stream));
}

void run_until(Stream& stream, std::uint64_t position) {
  while (stream.done < position) {
    const Work work = stream.queue.front();
    stream.queue.pop_front();
    ++stream.done;
    if (work.wait.device >= 0) {
      run_until(stream_of(work.wait.device, work.wait.stream), work.wait.position);
    } else if (work.fails) {
      stream.failed_at = stream.done;
    } else {
      std::memmove(work.copy.to, work.copy.from, work.copy.bytes);
    }
  }
}

void run_and_tell(Stream& stream, std::uint64_t position) {
  run_until(stream, position);
  if (stream.failed_at == 0 || stream.failed_at > position) return;
  stream.failed_at = 0;
  throw std::runtime_error("a copy failed on the private device");
}

void add(Stream& stream, const Work& work) {
  stream.queue.push_back(work);
  ++stream.queued;
}

bool overlap(const char* block, std::size_t bytes, const void* pointer, std::size_t length) {
  const auto* const start = static_cast<const char*>(pointer);
  return start < block + bytes && block < start + length;
}

const Block* block_of(const void* pointer) {
  auto after = state().blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == state().blocks.begin()) return nullptr;
  --after;
  return static_cast<const char*>(pointer) < after->first + after->second.bytes ? &after->second : nullptr;
}

bool on_host(const void* pointer) {
  const Block* const block = block_of(pointer);
  return block == nullptr || block->kind == Kind::Pinned;
}

}  // namespace

inline void* allocate(Kind kind, std::size_t bytes) {
  void* const memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, kUnwritten, bytes);
  const Lock lock(state().mutex);
  state().blocks[static_cast<const char*>(memory)] = {kind, bytes};
  return memory;
}

// Queued work that still uses the memory counts as a violation.
inline void release(Kind kind, void* memory) {
  if (memory == nullptr) return;
  const Lock lock(state().mutex);
  auto* const start = static_cast<const char*>(memory);
  const auto found = state().blocks.find(start);
  if (found == state().blocks.end() || found->second.kind != kind) {
    ++state().violations;
    return;
  }
  for (Device& device : state().devices) {
    for (Stream& stream : device.streams) {
      for (Work& work : stream.queue) {
        if (work.wait.device >= 0) continue;
        if (!overlap(start, found->second.bytes, work.copy.to, work.copy.bytes) &&
            !overlap(start, found->second.bytes, work.copy.from, work.copy.bytes)) {
          continue;
        }
        ++state().violations;
        work.copy.bytes = 0;  // counted; to run it would crash
      }
    }
  }
  state().blocks.erase(found);
  std::free(memory);
}

inline bool is_pinned(const void* pointer) {
  const Lock lock(state().mutex);
  const Block* const block = block_of(pointer);
  return block != nullptr && block->kind == Kind::Pinned;
}

inline std::int64_t pool_stream(int device) {
  const Lock lock(state().mutex);
  return 1 + state().devices.at(static_cast<std::size_t>(device)).next++ % kPoolStreams;
}

inline std::int64_t new_stream(int device) {
  const Lock lock(state().mutex);
  auto& streams = state().devices.at(static_cast<std::size_t>(device)).streams;
  streams.emplace_back();
  return static_cast<std::int64_t>(streams.size()) - 1;
}

inline void queue_copy(int device, std::int64_t stream, const Copy& copy) {
  std::unique_lock<std::mutex> lock(state().mutex);
  const bool from_host = on_host(copy.from), to_host = on_host(copy.to);
  if (from_host || to_host) {
    ++state().held_up;
    state().let_go.wait_for(lock, std::chrono::seconds(60), [] { return !state().held; });
    --state().held_up;
  }
  const bool due = state().fault != Fault::None && state().until_fault-- == 0;
  if (due && state().fault == Fault::Queue) {
    state().fault = Fault::None;
    throw std::runtime_error("a copy was refused by the private device");
  }
  ++state().copies;
  if (to_host) std::memset(copy.to, kUnwritten, copy.bytes);  // shows that the data have not come yet
  const bool fails = due && state().fault == Fault::Run;
  if (fails) state().fault = Fault::None;
  add(stream_of(device, stream), {copy, {}, fails});
}

inline void synchronize(int device, std::int64_t stream) {
  const Lock lock(state().mutex);
  Stream& waited = stream_of(device, stream);
  run_and_tell(waited, waited.queued);
}

inline void synchronize_device(int device) {
  const Lock lock(state().mutex);
  for (Stream& stream : state().devices.at(static_cast<std::size_t>(device)).streams) {
    run_and_tell(stream, stream.queued);
  }
}

inline bool idle(int device, std::int64_t stream) {
  const Lock lock(state().mutex);
  return stream_of(device, stream).queue.empty();
}

inline Event* new_event() {
  const Lock lock(state().mutex);
  ++state().events;
  return new Event;
}

inline void delete_event(Event* event) {
  const Lock lock(state().mutex);
  --state().events;
  delete event;
}

inline void record(Event* event, int device, std::int64_t stream) {
  const Lock lock(state().mutex);
  if (state().fault == Fault::Record && state().until_fault < 0) {
    state().fault = Fault::None;
    throw std::runtime_error("an event was refused by the private device");
  }
  *event = {device, stream, stream_of(device, stream).queued};
}

inline void block(const Event* event, int device, std::int64_t stream) {
  const Lock lock(state().mutex);
  if (event->device >= 0) add(stream_of(device, stream), {{}, *event, false});
}

inline void synchronize(const Event* event) {
  const Lock lock(state().mutex);
  if (event->device >= 0) run_and_tell(stream_of(event->device, event->stream), event->position);
}

inline bool reached(const Event* event) {
  const Lock lock(state().mutex);
  return event->device < 0 || stream_of(event->device, event->stream).done >= event->position;
}

inline void fail_copy(Fault fault, int skipped) {
  const Lock lock(state().mutex);
  state().fault = fault;
  state().until_fault = skipped;
}

inline void hold(bool held) {
  const Lock lock(state().mutex);
  state().held = held;
  state().let_go.notify_all();
}

inline int held_up() {
  const Lock lock(state().mutex);
  return state().held ? state().held_up : 0;
}

inline Statistics statistics() {
  const Lock lock(state().mutex);
  Statistics now{0, 0, state().events, state().copies, state().violations};
  for (const auto& entry : state().blocks)
    ++(entry.second.kind == Kind::Device ? now.device_blocks : now.pinned_blocks);
  return now;
}

}  // namespace private_device
