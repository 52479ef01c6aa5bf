// Every backend that is usable here, through the interface that the engine uses. What is moved: test_random.cpp.
#include <pthread.h>
#include <sys/resource.h>
#include <sys/utsname.h>

#include <cstdio>

#include "backends/registry.h"
#include "base/error.h"
#include "base/limits.h"
#include "check.h"
#include "engine/buffer_pool.h"
#include "support.h"

using namespace nvme_ops;
using std::chrono::milliseconds;
using namespace support;

namespace {

constexpr std::uint64_t kBlock = 8192;

template <class Action>
void on_every_backend(Action&& action) {
  for (const Backend* backend : backends()) {
    const check::Context context(std::string("backend ") + backend->name);
    if (probe(*backend).usable) {
      action(*backend);
    } else {
      check::skipped(std::string(backend->name) + ": " + probe(*backend).reason);
    }
  }
}

Completion one(Queue& queue, const Request& request) {
  Completion completion{0, -9999};
  while (queue.submit(&request, 1) == 0) {
  }
  while (queue.reap(&completion, 1, 1, milliseconds(50)) == 0) {
  }
  return completion;
}

// Linux 5.19, if that much memory may be locked.
bool ring_registers_buffers() {
  utsname system{};
  unsigned major = 0, minor = 0;
  rlimit locked{};
  return ::uname(&system) == 0 && std::sscanf(system.release, "%u.%u", &major, &minor) == 2 &&
         (major > 5 || (major == 5 && minor >= 19)) && ::getrlimit(RLIMIT_MEMLOCK, &locked) == 0 &&
         locked.rlim_cur >= 4 * kHugePage;
}

}  // namespace

TEST(a_registered_buffer_serves_and_can_be_refused) {
  on_every_backend([](const Backend& backend) {
    const Bytes data = pattern(kBlock, 1);
    const std::string path = stored("registered", data);
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    std::byte* const memory = BufferPool::instance().allocate(kHugePage);
    {
      const auto queue = backend.open({4, 2, false});
      for (int round = 0; round < 3; ++round) {
        std::memset(memory, 0, kBlock);
        const bool registered = queue->register_buffer(1, memory, kHugePage);
        CHECK(registered || &backend != &kIoUring || !ring_registers_buffers(), "a registered buffer");
        if (!registered && round == 0) check::skipped(std::string(backend.name) + " registers no buffers here");
        const Completion done = one(*queue, {Op::Read, fd.get(), memory, kBlock, 0, registered ? 1 : -1, 5});
        CHECK_EQUAL(done.result, std::int64_t{kBlock});
        CHECK_EQUAL(support::difference(memory, data.data(), kBlock), kBlock);
        if (registered) queue->unregister_buffer(1);
      }
    }
    BufferPool::instance().release(memory, 0);
  });
}

TEST(errors_and_ends_come_as_results) {
  on_every_backend([](const Backend& backend) {
    const std::string path = stored("short", pattern(100, 1));
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    const UniqueFd folder(::open((directory() / ".").c_str(), O_RDONLY | O_CLOEXEC));
    const Memory memory(kBlock);
    const auto queue = backend.open({4, 0, false});
    CHECK_EQUAL(one(*queue, {Op::Read, fd.get(), memory.data(), kBlock, 0, -1, 1}).result, std::int64_t{100});
    CHECK_EQUAL(one(*queue, {Op::Read, fd.get(), memory.data(), kBlock, 100, -1, 2}).result, std::int64_t{0});
    const auto bad_address = reinterpret_cast<std::byte*>(std::uintptr_t{8});
    CHECK_EQUAL(one(*queue, {Op::Write, fd.get(), bad_address, 10, 0, -1, 3}).result, std::int64_t{-EFAULT});
    CHECK_EQUAL(one(*queue, {Op::Read, fd.get(), memory.data(), 100, 0, -1, 4}).token, std::uint64_t{4});
  });
}

TEST(a_reap_with_nothing_to_collect_returns) {
  on_every_backend([](const Backend& backend) {
    const auto queue = backend.open({4, 0, false});
    Completion completion;
    CHECK_EQUAL(queue->reap(&completion, 1, 0, milliseconds(10)), std::size_t{0});
    CHECK_EQUAL(queue->reap(&completion, 1, 1, milliseconds(10)), std::size_t{0});
    CHECK_EQUAL(queue->reap(&completion, 1, 1, milliseconds(0)), std::size_t{0});
  });
}

// Default stacks larger than the address space: no thread can be started, as where a container's pids limit is reached.
TEST(requests_are_served_where_no_thread_can_be_started) {
  pthread_attr_t before, huge;
  pthread_getattr_default_np(&before);
  pthread_getattr_default_np(&huge);
  pthread_attr_setstacksize(&huge, std::size_t{1} << 47);
  CHECK_EQUAL(pthread_setattr_default_np(&huge), 0);
  const std::string path = stored("alone", pattern(100, 1));
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const Memory memory(kBlock);
  const auto queue = kThreads.open({4, 0, false});
  CHECK_EQUAL(one(*queue, {Op::Read, fd.get(), memory.data(), kBlock, 0, -1, 1}).result, std::int64_t{100});
  pthread_setattr_default_np(&before);
  pthread_attr_destroy(&before);
  pthread_attr_destroy(&huge);
}
