// Every allocation of a transfer fails in turn: each ends in the right bytes, in std::bad_alloc or in one failure that
// says so, never in a hang or an ended thread, and leaves an engine that works.
#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>

#include "check.h"
#include "engine/engine.h"
#include "engine/validate.h"
#include "engine/worker.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

std::atomic<long> allocations_left{-1};  // then one fails; negative: none
std::atomic<bool> failed{false};

void* allocate(std::size_t bytes) {
  if (allocations_left.load(std::memory_order_relaxed) >= 0 && allocations_left.fetch_sub(1) == 0) {
    failed = true;
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // inlined, they look like free() of what new returned

void* operator new(std::size_t bytes) {
  return allocate(bytes);
}
void* operator new[](std::size_t bytes) {
  return allocate(bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace {

// Runs `action` once for each allocation that it makes, in which that one fails.
template <class Action>
void with_each_allocation_failing(const char* what, const Action& action) {
  long number = 0;
  do {
    CHECK(number < 5000, "an end of the allocations of " << what);
    if (number >= 5000) return;
    action(number);
  } while (failed.exchange(false) && ++number > 0);
  CHECK(number > 0, what << " to allocate something");
}

struct Armed {
  explicit Armed(long number) { allocations_left = number; }
  ~Armed() { allocations_left = -1; }
};

// Moves a file one way, on the caller's thread or on lanes that start for it; what goes wrong is no memory.
void transfer(Engine& engine, Op op, bool all_lanes, const std::string& path, const Bytes& data, long number) {
  Memory memory(data.size(), 8);
  if (op == Op::Write) memory.set(data);
  std::optional<Failure> failure;
  bool moved = false;
  std::shared_ptr<Job> job;
  {
    const Armed armed(number);
    try {
      job = job_of(op, {extent(path, op, memory, 0)});
      job->outcome()->then([] {});
      if (all_lanes) {
        engine.submit(job);
        wait(*job, never);
      } else {
        engine.run(job, never);
      }
      failure = job->outcome()->failure();
      moved = !failure;
    } catch (const std::bad_alloc&) {
      failure = out_of_memory();
    } catch (...) {
      failure = current_failure();
    }
  }
  if (failure) {
    CHECK(failure->kind == Failure::Kind::Memory, "only no memory to go wrong, got '" << failure->message << "'");
    return;
  }
  const Bytes there = op == Op::Write ? support::read_file(path) : Bytes(memory.data(), memory.data() + memory.size());
  CHECK(moved && there == data, "the right bytes after success");
}

void works(Engine& engine, const std::string& path, const Bytes& data) {
  transfer(engine, Op::Write, true, path, data, -1);
  transfer(engine, Op::Read, false, path, data, -1);
}

const Bytes& data() {
  static const Bytes made = pattern((300 << 10) + 777, 5);
  return made;
}

TEST(transfers_of_a_new_engine) {
  const std::string path = directory() / "new";
  for (const Backend* backend : support::usable_backends()) {
    const check::Context context(backend->name);
    for (const Op op : {Op::Write, Op::Read}) {
      for (const bool all_lanes : {false, true}) {
        support::write_file(path, data());
        with_each_allocation_failing("a transfer", [&](long number) {
          Engine engine(support::engine_options(*backend, 64 << 10, 4, 2));
          transfer(engine, op, all_lanes, path, data(), number);
          works(engine, path, data());
        });
      }
    }
  }
}

TEST(an_engine_may_not_come_to_be) {
  for (const Backend* backend : support::usable_backends()) {
    with_each_allocation_failing("making an engine", [&](long number) {
      const Armed armed(number);
      try {
        const Engine engine(support::engine_options(*backend));
      } catch (const std::bad_alloc&) {
      }
    });
  }
}

TEST(validation) {
  const std::string path = stored("validated", data());
  const Backend& backend = *support::usable_backends().back();
  with_each_allocation_failing("validation", [&](long number) {
    Engine engine(support::engine_options(backend));
    Memory memory(data().size(), 8);
    const auto job = job_of(Op::Read, {extent(path, Op::Read, memory)});
    job->keep_extents();
    const FileHold hold(job->extents().front().file);
    engine.run(job, never);
    const Armed armed(number);
    try {
      validate(engine, *job, never);
    } catch (const std::bad_alloc&) {
    } catch (...) {
      CHECK(current_failure().kind == Failure::Kind::Memory, "only no memory to go wrong");
    }
  });
}

TEST(a_workers_tasks) {
  with_each_allocation_failing("posting", [&](long number) {
    Worker worker;
    std::atomic<int> ran{0};
    bool posted = true;
    {
      const Armed armed(number);
      try {
        worker.post([&ran] { ++ran; });
      } catch (const std::bad_alloc&) {
        posted = false;
      }
    }
    worker.post([&ran] { ++ran; });
    worker.stop();
    CHECK_EQUAL(ran.load(), posted ? 2 : 1);
  });
}

}  // namespace
