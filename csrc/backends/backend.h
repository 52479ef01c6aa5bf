// The interface between the engine and a backend: one file ending in one `Backend` row, listed in registry.cpp.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "base/io.h"

namespace nvme_ops {

// A bounded queue of requests, for one thread at a time. Once open it neither throws nor allocates: it answers every
// request that it took once, even if it fails. A forked child must not use or destroy its parent's.
class Queue {
public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  virtual ~Queue() = default;

  // Takes requests in order and returns how many; the caller offers the rest again after the next reap(), which submits
  // those taken at the latest. Never more than `depth` are in flight.
  virtual std::size_t submit(const Request* requests, std::size_t count) = 0;

  // Collects completions, waiting until there are at least `least`, `timeout` has passed or a signal has arrived.
  virtual std::size_t reap(Completion* completions, std::size_t most, std::size_t least,
                           std::chrono::milliseconds timeout) = 0;

  // Returns whether the waiting thread may serve a lone small request by a plain system call instead, which is faster.
  virtual bool may_be_bypassed() const { return true; }

  // Returns whether the queue has failed: requests it took are answered, but it should be replaced.
  virtual bool broken() const { return false; }

  // Registers memory as buffer `index`, sparing the kernel its per-request page lookup. Returns false if it cannot.
  virtual bool register_buffer(int /*index*/, std::byte* /*memory*/, std::size_t /*bytes*/) { return false; }
  virtual void unregister_buffer(int /*index*/) {}
};

struct QueueOptions {
  unsigned depth;
  unsigned buffers;    // how many buffers may be registered
  bool single_submit;  // one system call per request
};

struct Probe {
  bool usable;
  std::string reason;  // why it is not usable, with the fix
};

struct Backend {
  const char* name;
  Probe (*probe)();
  std::unique_ptr<Queue> (*open)(const QueueOptions&);  // throws IoError, std::bad_alloc; null if it was not built
};

template <class Kind>
std::unique_ptr<Queue> open_queue(const QueueOptions& options) {
  return std::make_unique<Kind>(options);
}

}  // namespace nvme_ops
