// Engine: what its callers rely on, on every backend.
#include <atomic>
#include <thread>

#include "check.h"
#include "engine/engine.h"
#include "engine/validate.h"
#include "fake_backend.h"
#include "support.h"

using namespace nvme_ops;
using support::Bytes;
using support::directory;
using support::engine_options;
using support::extent;
using support::job_of;
using support::Memory;
using support::never;
using support::pattern;

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

TEST(a_blocking_call_moves_everything) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend));
    const std::string path = directory() / "blocking";
    for (const std::size_t bytes : {0U, 1U, 511U, 4096U, 100000U, (5U << 20) + 7}) {
      const Bytes data = pattern(bytes, bytes);
      Memory source(bytes, 64), target(bytes, 100);
      source.set(data);
      const auto write = job_of(Op::Write, {extent(path, Op::Write, source)});
      engine.run(write, never);
      check_moved(write, bytes);
      support::evict(path);
      const auto read = job_of(Op::Read, {extent(path, Op::Read, target)});
      engine.run(read, never);
      check_moved(read, bytes);
      check_equal(target, data);
      CHECK_EQUAL(engine.staging_bytes(), std::size_t{0});
    }
  });
}

TEST(lanes_share_a_call) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend, 100000, 4, 4));
    const std::string path = directory() / "lanes";
    const Bytes data = pattern((6 << 20) + 123, 1);
    Memory source(data.size(), 3), target(data.size(), 5);
    source.set(data);
    const auto write = job_of(Op::Write, {extent(path, Op::Write, source, 1001)});
    engine.submit(write);
    wait(*write, never);
    check_moved(write, data.size());
    const auto read = job_of(Op::Read, {extent(path, Op::Read, target, 1001)});
    engine.submit(read);
    wait(*read, never);
    check_moved(read, data.size());
    check_equal(target, data);
  });
}

TEST(many_extents_move_in_one_call) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend, 1 << 20, 32, 3));
    const std::string path = directory() / "extents";
    const std::size_t count = 1000, bytes = 4096;
    const Bytes data = pattern(count * bytes, 1);
    support::write_file(path, data);
    support::evict(path);
    const Memory target(data.size());
    const auto file = support::shared(path, Op::Read);
    for (const bool all_lanes : {false, true}) {
      std::memset(target.data(), 0, target.size());
      std::vector<Extent> extents;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t place = i * 617 % count;
        extents.push_back({file, target.data() + place * bytes, bytes, place * bytes, false});
      }
      const auto job = job_of(Op::Read, std::move(extents));
      all_lanes ? engine.submit(job) : engine.run(job, never);
      wait(*job, never);
      check_moved(job, data.size());
      check_equal(target, data);
    }
  });
}

TEST(neighbouring_extents_share_pages) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend, 8192, 16, 4));
    const std::string path = directory() / "neighbours";
    const Bytes data = pattern(300000, 9);
    Memory source(data.size(), 8);
    source.set(data);
    const auto file = support::shared(path, Op::Write, Cache::Auto);
    std::vector<Extent> extents;
    for (std::size_t from = 0, bytes = 0; from < data.size(); from += bytes) {
      bytes = std::min<std::size_t>(1 + from % 9973, data.size() - from);
      extents.push_back({file, source.data() + from, bytes, from, false});
    }
    const auto job = job_of(Op::Write, std::move(extents));
    engine.submit(job);
    wait(*job, never);
    check_moved(job, data.size());
    CHECK(support::read_file(path) == data, "every extent's bytes in their place");
  });
}

TEST(an_engine_that_goes_finishes_its_work) {
  on_every_backend([](const Backend& backend) {
    const Bytes data = pattern(3 << 20, 1);
    Memory source(data.size(), 1);
    source.set(data);
    std::vector<std::shared_ptr<Job>> jobs;
    {
      Engine engine(engine_options(backend, 32768, 2, 2));
      for (int i = 0; i < 4; ++i) {
        const std::string path = directory() / ("pending" + std::to_string(i));
        jobs.push_back(job_of(Op::Write, {extent(path, Op::Write, source)}));
        engine.submit(jobs.back());
      }
    }
    for (int i = 0; i < 4; ++i) {
      check_moved(jobs[static_cast<std::size_t>(i)], data.size());
      CHECK(support::read_file(directory() / ("pending" + std::to_string(i))) == data, "the whole file written");
    }
  });
}

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

TEST(a_file_cut_while_it_is_read_is_an_end_of_file) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend));
    const std::string path = directory() / "cut";
    for (const std::uint64_t left : {0U, 100U, 4096U, 600001U}) {
      support::write_file(path, pattern(1 << 20, 1));
      const Memory target(1 << 20, 8);
      const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
      CHECK_EQUAL(::truncate(path.c_str(), static_cast<off_t>(left)), 0);
      engine.run(job, never);
      CHECK_FAILURE(job->outcome()->failure(), EndOfFile, 0, "has " + std::to_string(left) + " bytes");
    }
    support::write_file(path, pattern(5000, 2));
    const Memory target(5000);
    const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
    engine.run(job, never);
    check_moved(job, 5000);
  });
}

TEST(a_failing_job_leaves_the_others_alone) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend, 16384, 4, 1));
    const std::string good = directory() / "good", bad = directory() / "bad";
    const Bytes data = pattern(1 << 20, 1);
    support::write_file(good, data);
    support::evict(good);
    const Memory first(data.size(), 8), lost(data.size(), 8), last(data.size(), 8);
    support::write_file(bad, data);
    std::vector<std::shared_ptr<Job>> jobs{job_of(Op::Read, {extent(good, Op::Read, first)}),
                                           job_of(Op::Read, {extent(bad, Op::Read, lost)}),
                                           job_of(Op::Read, {extent(good, Op::Read, last)})};
    CHECK_EQUAL(::truncate(bad.c_str(), 5), 0);
    for (const auto& job : jobs) engine.submit(job);
    for (const auto& job : jobs) wait(*job, never);
    check_moved(jobs[0], data.size());
    CHECK_FAILURE(jobs[1]->outcome()->failure(), EndOfFile, 0, "");
    check_moved(jobs[2], data.size());
    check_equal(first, data);
    check_equal(last, data);
  });
}

TEST(an_interruption_stops_a_call_and_leaves_the_engine_usable) {
  const std::string path = directory() / "interrupted";
  const Bytes data = pattern(8 << 20, 1);
  support::write_file(path, data);
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

TEST(a_backend_that_cannot_open_is_passed_over) {
  const std::string path = directory() / "fallback";
  const Bytes data = pattern(100000, 1);
  support::write_file(path, data);
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
  {
    const std::lock_guard<std::mutex> lock(script.mutex);
    script.before_open = nullptr;
  }
  const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
  engine.run(job, never);
  check_moved(job, data.size());
}

TEST(validation_finds_the_first_difference) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend));
    const std::string path = directory() / "validated";
    const Bytes data = pattern(300000, 1);
    Memory source(data.size(), 8);
    source.set(data);
    const auto job = job_of(Op::Write, {extent(path, Op::Write, source, 50)});
    const FileHold open(job->extents().front().file);
    job->keep_extents();
    engine.run(job, never);
    validate(engine, *job, never);
    source.data()[200000] ^= std::byte{1};
    CHECK_FAILURE(check::failure_of([&] { validate(engine, *job, never); }), Mismatch, EIO, "at offset 200050");
  });
}

TEST(many_jobs_survive_a_ring_taken_away) {
  if (!probe(kIoUring).usable) {
    check::skipped("io_uring: " + probe(kIoUring).reason);
    return;
  }
  const std::string path = directory() / "many";
  const Bytes data = pattern(300000, 1);
  support::write_file(path, data);
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
    check::finishes("jobs on a ring that was taken away", [&] {
      submit(1);
      wait(*jobs.back(), never);
      take_rings_away();
      submit(40);
      for (const auto& job : jobs) wait(*job, never);
      submit(1);
      wait(*jobs.back(), never);
    });
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      if (!jobs[i]->outcome()->failure()) check_equal(*targets[i], data);
    }
    check_moved(jobs.back(), data.size());
  }
}

TEST(a_ring_taken_away_is_replaced) {
  if (!probe(kIoUring).usable) {
    check::skipped("io_uring: " + probe(kIoUring).reason);
    return;
  }
  const std::string path = directory() / "ring";
  const Bytes data = pattern(300000, 1);
  support::write_file(path, data);
  for (const bool single_submit : {false, true}) {
    const check::Context context(single_submit ? "single_submit" : "batches");
    EngineOptions options = engine_options(kIoUring);
    options.single_submit = single_submit;
    Engine engine(options);
    const Memory target(data.size(), 8);
    const auto transfer = [&] {
      const auto job = job_of(Op::Read, {extent(path, Op::Read, target)});
      engine.run(job, never);
      return job;
    };
    check_moved(transfer(), data.size());
    take_rings_away();
    CHECK_FAILURE(transfer()->outcome()->failure(), System, EOPNOTSUPP, "bytes at offset");
    check_moved(transfer(), data.size());
    check_equal(target, data);
  }
}

TEST(jobs_may_share_a_file) {
  on_every_backend([](const Backend& backend) {
    Engine engine(engine_options(backend, 16384, 4, 3));
    const std::string path = directory() / "shared";
    const Bytes data = pattern(400000, 1);
    support::write_file(path, data);
    for (int round = 0; round < 10; ++round) {
      std::vector<std::unique_ptr<Memory>> memories;
      std::vector<std::shared_ptr<Job>> jobs;
      auto file = support::shared(path, Op::Read);
      for (int i = 0; i < 4; ++i) {
        memories.push_back(std::make_unique<Memory>(data.size(), 8));
        jobs.push_back(job_of(Op::Read, {{file, memories.back()->data(), data.size(), 0, false}}));
      }
      file.reset();
      for (const auto& job : jobs) engine.submit(job);
      for (const auto& job : jobs) wait(*job, never);
      for (const auto& job : jobs) check_moved(job, data.size());
      for (const auto& memory : memories) check_equal(*memory, data);
    }
  });
}

TEST(a_job_that_ended_has_closed_its_files) {
  on_every_backend([](const Backend& backend) {
    const auto open_files = [] {
      return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
    };
    const auto before = open_files();
    {
      Engine engine(engine_options(backend, 16384, 4, 3));
      const std::string path = directory() / "closed";
      const Memory memory(100001, 8);
      std::vector<std::shared_ptr<Job>> jobs;
      for (const bool all_lanes : {true, false}) {
        const auto start = open_files();
        for (const Op op : {Op::Write, Op::Read, Op::Read, Op::Write}) {
          jobs.push_back(job_of(op, {extent(path, op, memory)}));
          all_lanes ? engine.submit(jobs.back()) : engine.run(jobs.back(), never);
          wait(*jobs.back(), never);
          CHECK(open_files() <= start + 4, "no more than a ring for each lane opened");
        }
      }
    }
    CHECK_EQUAL(open_files(), before);
  });
}

TEST(a_large_cached_read_is_divided_and_ends_before_the_engine) {
  on_every_backend([](const Backend& backend) {
    const std::string path = directory() / "cached";
    const Bytes data = pattern(kDividedBytes + 1, 1);
    support::write_file(path, data);
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
  const std::string path = directory() / "cached";
  const Bytes data = pattern(kDividedBytes, 1);
  support::write_file(path, data);
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
