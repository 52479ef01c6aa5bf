// Outcome, Job and Worker: settled once, told to all, tasks in order and none lost. Checksums.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/crc.h"
#include "check.h"
#include "engine/job.h"
#include "engine/outcome.h"
#include "engine/worker.h"
#include "support.h"

using namespace nvme_ops;
using std::chrono::milliseconds;
using support::Bytes;

namespace {

Failure failure_with(int error) {
  // Longer than what a string holds in place, so that a torn copy shows.
  return system_failure(error, "an operation whose description does not fit into the string object itself", "/a/path");
}

}  // namespace

TEST(listeners_are_told_once_before_or_after) {
  Outcome outcome;
  int told = 0;
  outcome.then([&] { told += 1; });
  outcome.then([&] {
    CHECK(outcome.done(), "the outcome to be settled when its listeners hear of it");
    outcome.then([&] { told += 100; });
    told += 10;
  });
  CHECK_EQUAL(told, 0);
  outcome.fail(failure_with(EIO));
  CHECK_EQUAL(told, 111);
  outcome.then([&] { told += 1000; });
  CHECK_EQUAL(told, 1111);
  CHECK_FAILURE(outcome.failure(), System, EIO, "an operation");
}

TEST(the_first_failure_counts) {
  Job job(Op::Read, {});
  job.expect_shares(2);
  CHECK(!job.stopped(), "a job that goes on");
  job.fail(failure_with(EIO));
  job.fail(failure_with(ENOSPC));
  CHECK(job.stopped(), "a job that stops");
  job.end_share(1);
  job.end_share(0);
  CHECK_FAILURE(job.outcome()->failure(), System, EIO, "an operation");
  CHECK_EQUAL(job.outcome()->bytes(), std::uint64_t{0});
}

// Ctrl-C on the thread that waits, while a lane ends the job.
TEST(failing_a_job_while_it_ends_is_safe) {
  for (int round = 0; round < 1000; ++round) {
    const auto job = support::job_of(Op::Read, {});
    job->expect_shares(2);
    std::thread interrupts([&] { job->fail(failure_with(EINTR)); });
    std::thread ends([&] { job->end_share(1); });
    job->end_share(2);
    ends.join();
    CHECK(job->outcome()->done(), "the job to have ended");
    if (const auto& failure = job->outcome()->failure()) {
      CHECK_FAILURE(failure, System, EINTR, "does not fit into the string object itself");
    } else {
      CHECK_EQUAL(job->outcome()->bytes(), std::uint64_t{3});
    }
    interrupts.join();
  }
}

TEST(tasks_run_in_order_on_one_thread) {
  std::vector<int> order;
  std::thread::id thread;
  {
    Worker worker;
    for (int i = 0; i < 100; ++i) {
      worker.post([&order, &thread, i] {
        CHECK(i == 0 || thread == std::this_thread::get_id(), "one thread for all");
        thread = std::this_thread::get_id();
        order.push_back(i);
      });
    }
  }
  CHECK_EQUAL(order.size(), std::size_t{100});
  for (int i = 0; i < 100; ++i) CHECK_EQUAL(order[static_cast<std::size_t>(i)], i);
  CHECK(thread != std::this_thread::get_id(), "a thread of the worker's own");
}

// Letting go of a tensor runs Python code, which may let go of the handle.
TEST(a_task_may_destroy_its_worker) {
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
  };
  const auto before = threads();
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ran{0};
    auto worker = std::make_unique<Worker>();
    worker->post([&] {
      worker.reset();
      ++ran;
    });
    while (ran.load() < 1 || threads() > before) std::this_thread::yield();
  }
}

// A transfer that ends while the interpreter does: its callback is posted while the worker stops.
TEST(posting_while_it_stops_neither_hangs_nor_loses_a_task) {
  for (int round = 0; round < 300; ++round) {
    std::atomic<int> ran{0}, running{0};
    {
      Worker worker;
      const auto task = [&] {
        CHECK(++running == 1, "one task at a time");
        --running;
        ++ran;
      };
      std::thread posts([&] {
        for (int i = 0; i < 20; ++i) worker.post(task);
      });
      for (int i = 0; i < 5; ++i) {
        worker.post(task);
        worker.stop();
      }
      posts.join();
    }
    CHECK_EQUAL(ran.load(), 25);
  }
}

namespace {

std::uint32_t of(Crc kind, const std::string& text) {
  return checksum(kind, reinterpret_cast<const std::byte*>(text.data()), text.size());
}

constexpr Crc kBoth[] = {Crc::Crc32, Crc::Crc32c};

}  // namespace

// RFC 3720, B.4
TEST(vectors_of_iscsi) {
  CHECK_EQUAL(of(Crc::Crc32c, std::string(32, '\0')), 0x8A9136AAU);
  CHECK_EQUAL(of(Crc::Crc32c, std::string(32, '\xFF')), 0x62A8AB43U);
}

TEST(folding_and_tables_agree_on_any_length_and_address) {
  const Bytes data = support::pattern(3000, 7);
  for (const Crc kind : kBoth) {
    for (std::size_t start = 0; start < 17; ++start) {
      for (std::size_t bytes = 0; bytes < 700; bytes += bytes < 200 ? 1 : 37) {
        CHECK_EQUAL(checksum(kind, data.data() + start, bytes, 0x12345678),
                    plain_checksum(kind, data.data() + start, bytes, 0x12345678));
      }
    }
  }
}

TEST(a_checksum_goes_on_from_another) {
  const Bytes data = support::pattern(100000, 3);
  for (const Crc kind : kBoth) {
    const std::uint32_t whole = checksum(kind, data.data(), data.size());
    for (const std::size_t cut : {0UL, 1UL, 63UL, 64UL, 4096UL, 99999UL, 100000UL}) {
      const std::uint32_t first = checksum(kind, data.data(), cut);
      const std::uint32_t second = checksum(kind, data.data() + cut, data.size() - cut);
      CHECK_EQUAL(checksum(kind, data.data() + cut, data.size() - cut, first), whole);
      CHECK_EQUAL(joined(kind, first, second, data.size() - cut), whole);
    }
  }
}
