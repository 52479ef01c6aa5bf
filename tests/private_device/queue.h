// The simulated device without torch: its memory, and streams that run nothing before somebody waits for them.
//
// A stream is the list of what was queued on it; an event is a place in such a list. Work runs, in order, when its
// stream or an event behind it is synchronised, or when a stream runs that was told to wait for such an event. So what
// a program does not wait for has not happened, every time and not only when a real device is slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace private_device {

constexpr int kDevices = 2;
constexpr int kPoolStreams = 4;             // beside the default stream, 0, and those made by new_stream
constexpr unsigned char kUnwritten = 0xEE;  // what stands where a queued copy has not arrived yet

enum class Kind : std::uint8_t { Device, Pinned };

void* allocate(Kind kind, std::size_t bytes);
void release(Kind kind, void* memory);  // queued work that still uses the memory counts as a violation
bool is_pinned(const void* pointer);

// Streams are numbered for each device on its own.
std::int64_t pool_stream(int device);
std::int64_t new_stream(int device);

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};
void queue_copy(int device, std::int64_t stream, const Copy& copy);
void synchronize(int device, std::int64_t stream);
void synchronize_device(int device);
bool idle(int device, std::int64_t stream);

struct Event;
Event* new_event();
void delete_event(Event* event);
void record(Event* event, int device, std::int64_t stream);
void block(const Event* event, int device, std::int64_t stream);
void synchronize(const Event* event);
bool reached(const Event* event);

// Lets a copy fail after `skipped` more of them: when it is queued; when it runs, which the next wait for it tells; or
// lets the event after it fail to be recorded. None: nothing fails.
enum class Fault : std::uint8_t { None, Queue, Run, Record };
void fail_copy(Fault fault, int skipped);

// Holds up whoever wants to queue a copy between host and device, or lets them all go on.
void hold(bool held);
int held_up();  // how many wait

struct Statistics {
  std::int64_t device_blocks, pinned_blocks, events, copies, violations;
};
Statistics statistics();

}  // namespace private_device
