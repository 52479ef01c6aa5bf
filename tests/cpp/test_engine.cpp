// Engine: what its callers rely on, on every backend; and what the kernel does rarely, done on demand: every fault ends
// in the right bytes or in exactly one failure, and leaves an engine that works.

#include <atomic>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/engine.h"
#include "fake_backend.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;
using fake::Script;
using fake::Verdict;

namespace {

template <class Action>
void on_every_backend(Action&& action) {
  for (const Backend* backend : support::usable_backends()) {
    const check::Context context(std::string("backend ") + backend->name);
    action(*backend);
  }
  const check::Context context("backend fake");
  fake::new_script();
  action(fake::kFake);
}

void check_moved(const std::shared_ptr<Job>& job, std::uint64_t bytes) {
  CHECK(job->outcome()->done(), "the job to have ended");
  CHECK(!job->outcome()->failure(), "success, not " << check::described(job->outcome()->failure()));
  CHECK_EQUAL(job->outcome()->bytes(), bytes);
}

void check_equal(const Memory& memory, const Bytes& data) {
  CHECK_EQUAL(support::difference(memory.data(), data.data(), data.size()), data.size());
  CHECK(memory.guards_intact(), "nothing written beside the memory");
}

// As by a program that closes or replaces descriptors that are not its own.
void take_rings_away() {
  const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone) != "anon_inode:[io_uring]") continue;
    ::dup3(null.get(), std::stoi(entry.path().filename()), O_CLOEXEC);
  }
}

}  // namespace

TEST(threads_share_an_engine) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend, 20000, 4, 2));
    std::vector<std::thread> threads;
    for (int id = 0; id < 4; ++id) {
      threads.emplace_back([&engine, id] {
        const std::string path = directory() / ("thread" + std::to_string(id));
        for (int round = 0; round < 6; ++round) {
          const Bytes data = pattern(200000 + static_cast<std::size_t>(round), static_cast<std::uint64_t>(id));
          Memory source(data.size(), 16), target(data.size(), 48);
          source.set(data);
          for (const Op op : {Op::Write, Op::Read}) {
            const auto job = job_of(op, {extent(path, op, op == Op::Write ? source : target, 10, Cache::Auto)});
            (id + round) % 2 == 0 ? engine.submit(job) : engine.run(job, never);
            wait(*job, never);
            check_moved(job, data.size());
          }
          check_equal(target, data);
          CHECK(engine.staging_bytes() <= kStagingBytes, "staging within its bound");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(an_interruption_stops_a_call_and_leaves_the_engine_usable) {
  const Bytes data = pattern(8 << 20, 1);
  const std::string path = stored("interrupted", data);
  support::evict(path);
  for (const bool all_lanes : {false, true}) {
    const check::Context context(all_lanes ? "on the lanes" : "on the caller's thread");
    fake::Script& script = fake::new_script();
    // What is in flight ends a while after the interruption, as on a device.
    script.judge = [](const Request&, bool) { return fake::Verdict{UINT64_MAX, 0, 200}; };
    Engine engine(engine_options(fake::kFake, 65536, 4, 2));
    const Memory target(data.size(), 8);
    const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
    const Interrupted interrupted = [] { return true; };
    const auto raised = check::failure_of([&] {
      all_lanes ? engine.submit(job) : engine.run(job, interrupted);
      wait(*job, interrupted);
    });
    CHECK_FAILURE(raised, Interrupted, 0, "interrupted");
    CHECK_FAILURE(job->outcome()->failure(), Interrupted, 0, "interrupted");
    {
      const std::lock_guard<std::mutex> lock(script.mutex);
      CHECK(script.requests < data.size() / 65536, "nothing new to be started, got " << script.requests);
      script.judge = nullptr;
    }
    const auto again = job_of(Op::Read, {extent(path, Op::Read, target)});
    engine.run(again, never);
    check_moved(again, data.size());
    check_equal(target, data);
  }
}

TEST(a_lone_small_request_takes_no_queue) {
  const Bytes data = pattern(4096, 1);
  const std::string path = stored("alone", data);
  for (const bool allowed : {true, false}) {
    fake::Script& script = fake::new_script();
    script.may_be_bypassed = allowed;
    Engine engine(engine_options(fake::kFake));
    CHECK_EQUAL(engine.statistics()["in_flight_sum"], 0U);
    const Memory target(data.size());
    const auto job = job_of(Op::Read, {extent(path, Op::Read, target, 0, Cache::Buffered)});
    engine.run(job, never);
    check_moved(job, data.size());
    check_equal(target, data);
    CHECK_EQUAL(script.requests, allowed ? 0U : 1U);
    CHECK_EQUAL(engine.statistics()["in_flight_sum"], 1U);
    CHECK_EQUAL(engine.statistics()["requests"], 1U);
  }
}

TEST(all_lanes_together_keep_to_the_staging_memory_of_their_engine) {
  fake::Script& script = fake::new_script();
  script.judge = [](const Request&, bool) { return fake::Verdict{0, EIO, 2000}; };  // after a while
  constexpr std::size_t kLanes = 8;
  Engine engine(engine_options(fake::kFake, 1 << 20, 32, kLanes));
  const Memory source(kLaneStagingBytes, 8);
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < kLanes; ++i) {
    extents.push_back(extent(directory() / "staged", Op::Write, source, i * kLaneStagingBytes));
  }
  const auto job = job_of(Op::Write, std::move(extents));
  engine.submit(job);
  std::size_t most = 0;
  while (!job->outcome()->done()) {
    most = std::max(most, engine.staging_bytes());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(most <= kStagingBytes, "at most " << kStagingBytes << " bytes, got " << most);
}

TEST(a_backend_that_cannot_open_is_passed_over) {
  const Bytes data = pattern(100000, 1);
  const std::string path = stored("fallback", data);
  fake::Script& script = fake::new_script();
  script.before_open = [] { fake::raise(EMFILE, "opening a queue"); };
  const Memory target(data.size(), 8);
  {
    EngineOptions options = engine_options(fake::kFake);
    options.backends.push_back(&kThreads);
    Engine engine(options);
    const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
    engine.run(job, never);
    check_moved(job, data.size());
  }
  Engine engine(engine_options(fake::kFake));
  for (const bool all_lanes : {false, true}) {
    const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
    all_lanes ? engine.submit(job) : engine.run(job, never);
    wait(*job, never);
    CHECK_FAILURE(job->outcome()->failure(), System, EMFILE, "opening a queue");
  }
  script.safely([](fake::Script& now) { now.before_open = nullptr; });
  const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
  engine.run(job, never);
  check_moved(job, data.size());
}

TEST(many_jobs_survive_a_ring_taken_away) {
  if (!probe(kIoUring).usable) {
    check::skipped("io_uring: " + probe(kIoUring).reason);
    return;
  }
  const Bytes data = pattern(300000, 1);
  const std::string path = stored("many", data);
  for (const bool single_submit : {false, true}) {
    const check::Context context(single_submit ? "single_submit" : "batches");
    EngineOptions options = engine_options(kIoUring, 16384, 32, 1);
    options.single_submit = single_submit;
    Engine engine(options);
    std::vector<std::unique_ptr<Memory>> targets;
    std::vector<std::shared_ptr<Job>> jobs;
    const auto submit = [&](std::size_t count) {
      for (; count > 0; --count) {
        targets.push_back(std::make_unique<Memory>(data.size(), 8));
        jobs.push_back(job_of(Op::Read, {extent(path, Op::Read, *targets.back())}));
        engine.submit(jobs.back());
      }
    };
    submit(1);
    wait(*jobs.back(), never);
    take_rings_away();
    submit(40);
    for (const auto& job : jobs) wait(*job, never);
    submit(1);
    wait(*jobs.back(), never);
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      if (!jobs[i]->outcome()->failure()) check_equal(*targets[i], data);
    }
    check_moved(jobs.back(), data.size());
  }
}

TEST(a_large_cached_read_is_divided_and_ends_before_the_engine) {
  on_every_backend([](const Backend& backend) {
    const Bytes data = pattern(kDividedBytes + 1, 1);
    const std::string path = stored("cached", data);
    const Memory first(data.size()), second(data.size(), 8);
    std::vector<std::shared_ptr<Job>> jobs;
    for (const Memory* memory : {&first, &second}) {
      jobs.push_back(job_of(Op::Read, {extent(path, Op::Read, *memory, 0, Cache::Auto)}));
    }
    {
      EngineOptions options = engine_options(backend, 1 << 20, 8);
      options.automatic = true;
      Engine engine(options);
      engine.submit(jobs[1]);
      engine.run(jobs[0], never);
      check_moved(jobs[0], data.size());
    }
    check_moved(jobs[1], data.size());
    check_equal(first, data);
    check_equal(second, data);
  });
}

TEST(an_interrupted_read_has_ended_on_both_of_its_lanes) {
  const Bytes data = pattern(kDividedBytes, 1);
  const std::string path = stored("cached", data);
  const Memory first(data.size()), second(data.size());
  EngineOptions options = engine_options(*support::usable_backends().front(), 1 << 20, 8);
  options.automatic = true;
  Engine engine(options);
  for (int round = 0; round < 10; ++round) {
    std::vector<Extent> extents;  // each lane has a memory of its own
    for (int i = 0; i < 64; ++i) {
      extents.push_back(extent(path, Op::Read, i < 32 ? first : second, 0, Cache::Auto));
    }
    const auto job = job_of(Op::Read, std::move(extents));
    const auto raised = check::failure_of([&] { engine.run(job, [] { return true; }); });
    CHECK(job->outcome()->done(), "nothing to be in flight any more");
    CHECK_FAILURE(raised, Interrupted, 0, "interrupted");
  }
  const auto again = job_of(Op::Read, {extent(path, Op::Read, first, 0, Cache::Auto)});
  engine.run(again, never);
  check_moved(again, data.size());
  check_equal(first, data);
}

namespace {

constexpr std::size_t kBytes = (300 << 10) + 1234;
constexpr std::uint64_t kOffset = 1000;

// An engine on the fake backend, a file of known contents, and both directions on one or all lanes.
class Bench {
public:
  Bench() : script_(fake::new_script()), engine_(engine_options(fake::kFake, 20480, 4, 2)) {}

  Script& script() { return script_; }
  Engine& engine() { return engine_; }

  // The outcome of one transfer through staging, checked to be right when it succeeds.
  std::optional<Failure> transfer(Op op, bool all_lanes, const Interrupted& interrupted = never) {
    const std::string path = directory() / "faults";
    Bytes expected = pattern(kOffset + kBytes + 5000, 1);
    support::write_file(path, expected);
    const Bytes data = pattern(kBytes, ++seed_);
    Memory memory(kBytes, 8);
    if (op == Op::Write) {
      memory.set(data);
      std::copy(data.begin(), data.end(), expected.begin() + kOffset);
    }
    std::atomic<int> settled{0};
    const auto job = job_of(op, {extent(path, op, memory, kOffset)});
    job->outcome()->then([&] { ++settled; });
    std::optional<Failure> raised;
    raised = check::failure_of([&] {
      all_lanes ? engine_.submit(job) : engine_.run(job, interrupted);
      wait(*job, interrupted);
    });
    CHECK(job->outcome()->done(), "the job to have ended when the call returns");
    CHECK(!raised || raised->kind == Failure::Kind::Interrupted, "nothing raised, got " << check::described(raised));
    while (settled == 0) std::this_thread::yield();
    CHECK_EQUAL(settled.load(), 1);
    CHECK(memory.guards_intact(), "nothing written beside the memory");
    if (job->outcome()->failure()) return job->outcome()->failure();
    CHECK_EQUAL(job->outcome()->bytes(), kBytes);
    CHECK(support::read_file(path) == expected, "the file as it was with the bytes written in their place");
    CHECK_EQUAL(support::difference(memory.data(), expected.data() + kOffset, kBytes), kBytes);
    return std::nullopt;
  }

  // Everything back to normal: the engine must work as if nothing had been.
  void must_work() {
    script_.safely([](Script& script) {
      script.judge = nullptr, script.take = nullptr, script.breaks = nullptr, script.before_open = nullptr;
    });
    for (const Op op : {Op::Write, Op::Read}) {
      for (const bool all_lanes : {false, true}) must_succeed(op, all_lanes);
    }
    while (engine_.staging_bytes() > 0) std::this_thread::yield();  // lanes free it after the last outcome is known
  }

  void must_succeed(Op op, bool all_lanes) {
    const auto failure = transfer(op, all_lanes);
    CHECK(!failure, "a " << name_of(op) << " to succeed, not " << check::described(failure));
  }

private:
  Script& script_;
  Engine engine_;
  std::uint64_t seed_ = 1;
};

// Both directions, on the caller's thread and on the lanes.
template <class Action>
void each_way(Action&& action) {
  for (const Op op : {Op::Read, Op::Write}) {
    for (const bool all_lanes : {false, true}) {
      const check::Context context(std::string(name_of(op)) + (all_lanes ? " on lanes" : " inline"));
      action(op, all_lanes);
    }
  }
}

// A script whose verdict may depend on how often it was asked.
Script::Judge counted(std::function<Verdict(unsigned long, const Request&, bool)> judge) {
  return [judge = std::move(judge), count = 0UL](const Request& request, bool direct) mutable {
    return judge(++count, request, direct);
  };
}

struct Fault {
  std::string name;
  int error;  // of the one failure that it ends in, which names operation, offset and file; 0: it is not noticed
  std::function<void(Script&)> prepare;
};

Script::Judge always(Verdict verdict) {
  return [=](const Request&, bool) { return verdict; };
}

std::vector<Fault> faults() {
  std::vector<Fault> all{{"all requests fail", ENOSPC, [](Script& script) { script.judge = always({0, ENOSPC, 3}); }},
                         {"again for ever", EAGAIN, [](Script& script) { script.judge = always({0, EAGAIN}); }},
                         {"cached I/O is refused", EINVAL, [](Script& script) { script.judge = always({0, EINVAL}); }}};
  for (const unsigned long at : {1UL, 7UL, 15UL}) {
    all.push_back({"an error in mid request " + std::to_string(at), EIO, [at](Script& script) {
                     script.judge = counted([at](unsigned long count, const Request&, bool) {
                       return count == at ? Verdict{3000, EIO} : Verdict{};
                     });
                   }});
  }
  for (const int error : {EAGAIN, EINTR, ECANCELED}) {
    all.push_back({"a storm of " + error_text(error), 0, [error](Script& script) {
                     script.judge = counted([error](unsigned long count, const Request&, bool) {
                       return count % 20 == 0 ? Verdict{} : Verdict{0, error};
                     });
                   }});
    const unsigned long from = error == EINTR ? 9 : 1;
    const int refusal = error == ECANCELED ? EOPNOTSUPP : EINVAL;
    all.push_back({"direct I/O refused from " + std::to_string(from) + " on", 0, [=](Script& script) {
                     script.judge = counted([=](unsigned long count, const Request&, bool direct) {
                       return direct && count >= from ? Verdict{0, refusal}
                                                      : Verdict{UINT64_MAX, 0, static_cast<unsigned>(count % 3)};
                     });
                   }});
  }
  return all;
}

}  // namespace

TEST(each_fault_is_one_failure_or_is_not_noticed) {
  each_way([](Op op, bool all_lanes) {
    for (const Fault& fault : faults()) {
      const check::Context context(fault.name);
      Bench bench;
      fault.prepare(bench.script());
      const auto failure = bench.transfer(op, all_lanes);
      CHECK_EQUAL(failure ? failure->error : 0, fault.error);
      if (fault.error != 0) CHECK_FAILURE(failure, System, fault.error, std::string(name_of(op)) + " of ");
      CHECK(!failure || failure->path == directory() / "faults", "the file named");
      bench.must_work();
    }
  });
}

// Its descriptor was closed by someone, say.
TEST(a_queue_that_fails_is_replaced) {
  each_way([](Op op, bool all_lanes) {
    for (const int at : {1, 4}) {
      Bench bench;
      bench.script().judge = always({UINT64_MAX, 0, 2});
      bench.script().breaks = [at, calls = 0]() mutable { return ++calls == at ? EOPNOTSUPP : 0; };
      CHECK_FAILURE(bench.transfer(op, all_lanes), System, EOPNOTSUPP, "bytes at offset");
      const unsigned long opened = bench.script().opened;
      bench.must_work();
      CHECK(bench.script().opened > opened, "a new queue");
    }
  });
}

TEST(a_queue_that_fails_and_cannot_be_replaced_is_one_failure) {
  each_way([](Op op, bool all_lanes) {
    Bench bench;
    bench.script().judge = always({5000, 0, 2});  // all leave rests
    bench.script().breaks = [calls = 0]() mutable { return ++calls == 3 ? EBADF : 0; };
    bench.script().before_open = [calls = 0]() mutable {
      if (++calls > 1) fake::raise(EMFILE, "opening a queue");
    };
    const auto failure = bench.transfer(op, all_lanes);
    CHECK(failure && failure->kind == Failure::Kind::System, "a failure, not " << check::described(failure));
    bench.must_work();
  });
}

TEST(nothing_moved_is_a_failure) {
  for (const bool all_lanes : {false, true}) {
    for (const Op op : {Op::Read, Op::Write}) {
      Bench bench;
      bench.script().judge =
          counted([](unsigned long count, const Request&, bool) { return Verdict{count % 5 == 0 ? 0 : UINT64_MAX}; });
      const auto failure = bench.transfer(op, all_lanes);
      if (op == Op::Write) CHECK_FAILURE(failure, System, EIO, "write");
      if (op == Op::Read) CHECK_FAILURE(failure, EndOfFile, 0, "passes the end of the file");
      bench.must_work();
    }
  }
}

TEST(a_queue_that_takes_nothing_can_be_interrupted) {
  each_way([](Op op, bool all_lanes) {
    Bench bench;
    bench.script().take = [](std::size_t) { return std::size_t{0}; };
    CHECK_FAILURE(bench.transfer(op, all_lanes, [] { return true; }), Interrupted, 0, "interrupted");
    bench.must_work();
  });
}

TEST(refused_buffers_are_done_without) {
  Script& script = fake::new_script();
  script.registers = false;
  Engine engine(engine_options(fake::kFake, 1 << 20, 4, 1));
  const Bytes data = pattern(8 << 20, 1);
  Memory memory(data.size(), 8);
  memory.set(data);
  const std::string path = directory() / "unregistered";
  const auto job = job_of(Op::Write, {extent(path, Op::Write, memory)});
  engine.run(job, never);
  CHECK(!job->outcome()->failure(), "success, not " << check::described(job->outcome()->failure()));
  CHECK(support::read_file(path) == data, "what was written");
  CHECK(script.refused_registrations <= 1, "one attempt, got " << script.refused_registrations);
}

TEST(a_fault_of_one_job_is_not_another_jobs) {
  for (const std::uint64_t lanes : {1U, 3U}) {
    Script& script = fake::new_script();
    Engine engine(engine_options(fake::kFake, 16384, 8, lanes));
    const std::string good = directory() / "good", bad = directory() / "bad";
    const Bytes data = pattern(1 << 20, 1);
    support::write_file(good, data);
    support::write_file(bad, data);
    struct stat status{};
    ::stat(bad.c_str(), &status);
    script.judge = counted([inode = status.st_ino](unsigned long count, const Request& request, bool) {
      struct stat now{};
      ::fstat(request.fd, &now);
      return Verdict{UINT64_MAX, now.st_ino == inode ? EIO : 0, static_cast<unsigned>(count % 4)};
    });
    std::vector<std::unique_ptr<Memory>> memories;
    std::vector<std::shared_ptr<Job>> jobs;
    for (int i = 0; i < 9; ++i) {
      memories.push_back(std::make_unique<Memory>(data.size(), 8));
      jobs.push_back(job_of(Op::Read, {extent(i % 3 == 1 ? bad : good, Op::Read, *memories.back())}));
    }
    for (const auto& job : jobs) engine.submit(job);
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      wait(*jobs[i], never);
      const auto& failure = jobs[i]->outcome()->failure();
      if (i % 3 == 1) {
        CHECK_FAILURE(failure, System, EIO, "read");
      } else {
        CHECK(!failure, "success, not " << check::described(failure));
        CHECK_EQUAL(support::difference(memories[i]->data(), data.data(), data.size()), data.size());
      }
    }
  }
}
