// What the engine asks of a way to reach the kernel. A backend is one file ending in one `Backend` row, listed in
// registry.cpp; nothing else changes when one is added.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "base/io.h"

namespace nvme_ops {

// A bounded queue of requests in the kernel. Used by one thread at a time. Once open it never throws and never
// allocates: every request it took is answered by exactly one completion, whatever happens to the queue. After a fork
// the child leaves it alone: it is neither used nor destroyed there.
class Queue {
public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  virtual ~Queue() = default;

  // Takes requests in order and returns how many it took; the rest are offered again after the next reap().
  // What was taken is on its way at the latest when reap() is called. Never more than `depth` are in flight.
  virtual std::size_t submit(const Request* requests, std::size_t count) = 0;

  // Collects completions, waiting until `least` are there, `timeout` has passed or a signal has arrived.
  virtual std::size_t reap(Completion* completions, std::size_t most, std::size_t least,
                           std::chrono::milliseconds timeout) = 0;

  // Whether a lone small request may be a plain system call of the waiting thread instead, which is served sooner.
  virtual bool may_be_passed_by() const { return true; }

  // The queue has failed: what it took has been or will be answered, but it should be replaced.
  virtual bool broken() const { return false; }

  // Registers memory as buffer `index`, sparing the kernel its per-request page lookup. False: do without.
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
  std::string reason;  // why not, with the fix
};

struct Backend {
  const char* name;
  Probe (*probe)();
  std::unique_ptr<Queue> (*open)(const QueueOptions&);  // throws IoError, std::bad_alloc
};

}  // namespace nvme_ops
