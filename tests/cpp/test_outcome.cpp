// Outcome and Job: settled once, told to all, the first failure counts.
#include <atomic>
#include <thread>

#include "check.h"
#include "engine/job.h"
#include "engine/outcome.h"
#include "support.h"

using namespace nvme_ops;
using std::chrono::milliseconds;

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

TEST(listeners_added_while_it_settles_are_not_lost) {
  for (int round = 0; round < 500; ++round) {
    Outcome outcome;
    std::atomic<int> told{0};
    std::thread settles([&] { outcome.succeed(1); });
    for (int i = 0; i < 3; ++i) outcome.then([&] { ++told; });
    settles.join();
    CHECK_EQUAL(told.load(), 3);
  }
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
