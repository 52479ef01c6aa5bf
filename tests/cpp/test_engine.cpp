// Engine: what its callers rely on, on every backend.
#include <atomic>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/engine.h"
#include "engine/validate.h"
#include "fake_backend.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

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
