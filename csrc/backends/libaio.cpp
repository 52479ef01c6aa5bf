// Linux's older asynchronous interface. Only its header is needed to build; the library is opened at run time.
#include "backends/registry.h"
#include "base/error.h"
#include "base/symbol.h"

#ifdef NVME_OPS_HAVE_LIBAIO

#include <dlfcn.h>
#include <errno.h>
#include <libaio.h>

#include <algorithm>
#include <vector>

namespace nvme_ops {
namespace {

struct Library {
  decltype(&::io_setup) setup = nullptr;
  decltype(&::io_destroy) destroy = nullptr;
  decltype(&::io_submit) submit = nullptr;
  decltype(&::io_getevents) getevents = nullptr;
  bool complete = false;

  Library() {
    void* handle = nullptr;
    for (const char* name : {"libaio.so.1", "libaio.so.1t64"}) {
      if (handle == nullptr) handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    complete = handle != nullptr && find_symbol(handle, "io_setup", &setup) &&
               find_symbol(handle, "io_destroy", &destroy) && find_symbol(handle, "io_submit", &submit) &&
               find_symbol(handle, "io_getevents", &getevents);
  }
};

constexpr unsigned kPrioritised = 1U << 1;  // IOCB_FLAG_IOPRIO, Linux 4.18

const Library& library() {
  static const Library loaded;
  return loaded;
}

class LibaioQueue final : public Queue {
public:
  explicit LibaioQueue(const QueueOptions& options)
      : most_per_call_(options.single_submit ? 1 : options.depth),
        control_blocks_(options.depth),
        free_(options.depth) {
    for (unsigned i = 0; i < options.depth; ++i) free_[i] = &control_blocks_[i];
    batch_.reserve(options.depth);
    refused_.reserve(options.depth);
    events_.reserve(options.depth);
    const int result = library().setup(static_cast<int>(options.depth), &context_);
    if (result < 0) {
      raise(no_queue(-result, "io_setup for " + std::to_string(options.depth) +
                                  " events (sysctl -w fs.aio-max-nr=1048576 raises the limit)"));
    }
  }

  ~LibaioQueue() override {
    if (context_ != nullptr) library().destroy(context_);
  }

  std::size_t submit(const Request* requests, std::size_t count) override {
    std::size_t taken = 0;
    while (taken < count && !free_.empty()) {
      batch_.clear();
      const std::size_t most = std::min({count - taken, free_.size(), static_cast<std::size_t>(most_per_call_)});
      for (std::size_t i = 0; i < most; ++i) {
        batch_.push_back(prepare(*free_[free_.size() - 1 - i], requests[taken + i]));
      }
      const int result = library().submit(context_, static_cast<long>(most), batch_.data());
      if (result == -EINTR) continue;
      if (result == -EAGAIN || result == 0) break;
      if (result < 0) {  // the first of the batch was refused, the others go on
        refused_.push_back({requests[taken++].token, result});
        continue;
      }
      free_.resize(free_.size() - static_cast<std::size_t>(result));
      taken += static_cast<std::size_t>(result);
    }
    return taken;
  }

  std::size_t reap(Completion* completions, std::size_t most, std::size_t least,
                   std::chrono::milliseconds timeout) override {
    std::size_t count = 0;
    for (; count < most && !refused_.empty(); refused_.pop_back()) completions[count++] = refused_.back();
    events_.resize(std::min(most - count, control_blocks_.size()));
    timespec wait{timeout.count() / 1000, (timeout.count() % 1000) * 1'000'000};
    const int got = library().getevents(context_, static_cast<long>(count > 0 ? 0 : std::min(least, events_.size())),
                                        static_cast<long>(events_.size()), events_.data(), &wait);
    for (int i = 0; i < got; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      completions[count++] = {reinterpret_cast<std::uint64_t>(event.data), static_cast<std::int64_t>(event.res)};
      free_.push_back(event.obj);
    }
    return count;
  }

private:
  static iocb* prepare(iocb& block, const Request& request) {
    block = {};
    block.aio_lio_opcode = request.op == Op::Read ? IO_CMD_PREAD : IO_CMD_PWRITE;
    block.aio_fildes = request.fd;
    block.u.c.buf = request.data;
    block.u.c.nbytes = request.bytes;
    block.u.c.offset = static_cast<long long>(request.offset);
    block.data = reinterpret_cast<void*>(request.token);
    if (const std::uint16_t priority = io_priority(request.priority)) {
      block.aio_reqprio = static_cast<short>(priority);
      block.u.c.flags = kPrioritised;
    }
    return &block;
  }

  const unsigned most_per_call_;
  io_context_t context_ = nullptr;
  std::vector<iocb> control_blocks_;
  std::vector<iocb*> free_;
  std::vector<iocb*> batch_;
  std::vector<io_event> events_;
  std::vector<Completion> refused_;
};

Probe probe_libaio() {
  if (!library().complete) return {false, "libaio.so.1 is not installed (apt install libaio1, dnf install libaio)"};
  io_context_t context = nullptr;
  const int result = library().setup(1, &context);
  if (result == -EAGAIN) return {false, "fs.aio-max-nr is used up (sysctl -w fs.aio-max-nr=1048576)"};
  if (result < 0) return {false, system_failure(-result, "io_setup").message};
  library().destroy(context);
  return {true, {}};
}

}  // namespace

const Backend kLibaio{"libaio", probe_libaio, open_queue<LibaioQueue>};

}  // namespace nvme_ops

#else

namespace nvme_ops {

const Backend kLibaio{
    "libaio",
    [] { return Probe{false, "built without libaio's headers (apt install libaio-dev, dnf install libaio-devel)"}; },
    nullptr};

}  // namespace nvme_ops

#endif
