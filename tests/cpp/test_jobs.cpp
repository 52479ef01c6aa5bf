// Whose turn it is: Schedule without a file, a queue or a clock, admission to the device, priorities in an engine.
// Outcome, Job and Worker: settled once, told to all, tasks in order and none lost. Checksums.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/crc.h"
#include "base/limits.h"
#include "check.h"
#include "engine/admission.h"
#include "engine/engine.h"
#include "engine/job.h"
#include "engine/outcome.h"
#include "engine/schedule.h"
#include "engine/worker.h"
#include "fake_backend.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

struct Item {
  char name;
  Priority urgency;
  unsigned left;  // pieces
  unsigned turn = 0;
  std::list<Item>::iterator self = {};

  Priority priority() const { return urgency; }
};

using Shares = Schedule<Item>;

void add(Shares& shares, char name, Priority priority, unsigned pieces) {
  Shares::Items items;
  items.push_back({name, priority, pieces});
  items.front().self = items.begin();
  shares.add(std::move(items));
}

// The names of the pieces in the order in which they are planned, at most `most` of them.
std::string planned(Shares& shares, std::size_t most) {
  std::string order;
  Shares::Items ended;
  while (order.size() < most) {
    shares.begin();
    Item* const item = shares.next();
    if (item == nullptr) break;
    order += item->name;
    shares.planned(*item);
    if (--item->left == 0) shares.release(*item, ended);
  }
  return order;
}

std::size_t count(const std::string& text, char name) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), name));
}

}  // namespace

TEST(shares_of_one_priority_take_turns) {
  Shares shares;
  add(shares, 'a', Priority::Demand, 40);
  add(shares, 'b', Priority::Demand, 20);
  CHECK_EQUAL(planned(shares, 100), std::string(16, 'a') + std::string(16, 'b') + std::string(16, 'a') +
                                        std::string(4, 'b') + std::string(8, 'a'));
  CHECK(shares.empty(), "all planned");
}

TEST(priorities_are_planned_in_their_order) {
  Shares shares;
  add(shares, 'b', Priority::Background, 2);
  add(shares, 'w', Priority::Writeback, 2);
  add(shares, 'p', Priority::Prefetch, 2);
  add(shares, 'd', Priority::Demand, 2);
  CHECK_EQUAL(planned(shares, 100), std::string("ddppwwbb"));
}

TEST(a_lower_priority_gets_its_piece_after_a_bounded_number_of_others) {
  Shares shares;
  add(shares, 'd', Priority::Demand, 100000);
  add(shares, 'p', Priority::Prefetch, 100000);
  add(shares, 'b', Priority::Background, 100000);
  const std::string order = planned(shares, 6600);
  for (const char name : {'p', 'b'}) {
    std::size_t since = 0, longest = 0;
    for (const char each : order) {
      since = each == name ? 0 : since + 1;
      longest = std::max(longest, since);
    }
    CHECK(longest < Shares::kPatientPieces + kPriorities,
          "fewer than " << Shares::kPatientPieces + kPriorities << " others, got " << longest);
  }
  CHECK(count(order, 'd') > 6300, "demand to have nearly all, got " << count(order, 'd'));
}

TEST(what_is_passed_over_lets_others_go_first_and_comes_again_in_the_next_pass) {
  Shares shares;
  add(shares, 'a', Priority::Demand, 2);
  add(shares, 'b', Priority::Demand, 2);
  add(shares, 'c', Priority::Writeback, 2);
  shares.begin();
  std::string asked;
  while (Item* const item = shares.next()) {
    asked += item->name;
    shares.pass_over(*item);
  }
  CHECK_EQUAL(asked, std::string("abc"));
  CHECK_EQUAL(planned(shares, 1), std::string("a"));
}

TEST(whatever_is_added_is_planned_to_its_end) {
  Random random(check::from_environment("NVME_OPS_TEST_SEED", 1));
  for (int round = 0; round < 200; ++round) {
    Shares shares;
    std::size_t pieces = 0;
    for (std::uint64_t i = support::between(random, 1, 40); i > 0; --i) {
      const auto size = static_cast<unsigned>(support::between(random, 1, 50));
      add(shares, 'x', static_cast<Priority>(support::between(random, 0, kPriorities - 1)), size);
      pieces += size;
    }
    CHECK_EQUAL(planned(shares, SIZE_MAX).size(), pieces);
    CHECK(shares.empty(), "nothing left");
  }
}

namespace {

constexpr std::uint64_t kPiece = 1 << 20;

Admission& engine() {
  static Admission admission;
  return admission;
}

// How many pieces are admitted before one is not.
std::uint64_t admitted(Priority priority) {
  std::uint64_t count = 0;
  while (count < 1000 && engine().admit(priority, kPiece)) ++count;
  for (std::uint64_t i = 0; i < count; ++i) engine().finish(priority, kPiece);
  return count;
}

void let_demand_pass() {
  std::this_thread::sleep_for(std::chrono::milliseconds(kRecentMilliseconds + kDemandMilliseconds));
}

}  // namespace

TEST(without_demand_much_is_admitted_but_no_queue_full) {
  let_demand_pass();
  CHECK_EQUAL(admitted(Priority::Writeback), kDeferableBytes / kPiece);
  CHECK_EQUAL(admitted(Priority::Background), kDeferableBytes / kPiece);
}

TEST(while_somebody_waits_little_is_admitted) {
  let_demand_pass();
  CHECK(engine().admit(Priority::Demand, kPiece), "demand admitted");
  CHECK_EQUAL(admitted(Priority::Prefetch), kYieldingBytes / kPiece);
  CHECK_EQUAL(admitted(Priority::Writeback), kYieldingBytes / kPiece);
  engine().finish(Priority::Demand, kPiece);
  CHECK_EQUAL(admitted(Priority::Writeback), kYieldingBytes / kPiece);  // more of it is expected
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * kDemandMilliseconds));
  CHECK_EQUAL(admitted(Priority::Writeback), kRecentBytes / kPiece);  // and may come back
  let_demand_pass();
  CHECK_EQUAL(admitted(Priority::Writeback), kDeferableBytes / kPiece);
}

TEST(io_priorities_are_those_of_the_kernel) {
  CHECK_EQUAL(io_priority(Priority::Demand), std::uint16_t{0});  // the process's own
  CHECK_EQUAL(io_priority(Priority::Prefetch), std::uint16_t{2 << 13 | 5});
  CHECK_EQUAL(io_priority(Priority::Writeback), std::uint16_t{2 << 13 | 6});
  CHECK_EQUAL(io_priority(Priority::Background), std::uint16_t{2 << 13 | 7});
}

TEST(one_request_however_large_is_admitted_when_it_is_alone) {
  note_demand();
  CHECK(engine().admit(Priority::Background, 10 * kDeferableBytes), "the only one");
  CHECK(!engine().admit(Priority::Background, 1), "no second one");
  engine().finish(Priority::Background, 10 * kDeferableBytes);
}

namespace {

constexpr std::uint64_t kBlock = 64 << 10;
constexpr std::uint64_t kDepth = 8;

std::shared_ptr<Job> job_of(Op op, const std::string& name, const Memory& memory, Priority priority) {
  return std::make_shared<Job>(op, std::vector<Extent>{extent(directory() / name, op, memory)}, priority);
}

// Requests that one lane hands to the kernel after a read is submitted behind a large write, up to the read.
std::uint64_t requests_before_the_read(Priority write_priority, Priority read_priority) {
  support::write_file(directory() / "read", support::pattern(kBlock, 1));
  fake::Script& script = fake::new_script();
  std::uint64_t seen = 0, submitted_at = 0, found_at = 0;
  script.judge = [&](const nvme_ops::Request& request, bool) {
    ++seen;
    if (request.op == Op::Read && found_at == 0) found_at = seen;
    return fake::Verdict{UINT64_MAX, 0, 2};
  };
  Memory large(400 * kBlock), small(kBlock);
  Engine engine(engine_options(fake::kFake, kBlock, kDepth, 1));
  const auto write = job_of(Op::Write, "write", large, write_priority);
  const auto read = job_of(Op::Read, "read", small, read_priority);
  engine.submit(write);
  for (std::uint64_t now = 0; now < 2 * kDepth;) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    now = script.safely([&](fake::Script&) { return submitted_at = seen; });
  }
  engine.submit(read);
  wait(*read, support::never);
  wait(*write, support::never);
  CHECK(!read->outcome()->failure() && !write->outcome()->failure(), "both to end well");
  const std::lock_guard<std::mutex> lock(script.mutex);
  return found_at - submitted_at;
}

}  // namespace

TEST(a_demand_read_passes_a_write_back_within_a_queue) {
  const std::uint64_t passed_by = requests_before_the_read(Priority::Writeback, Priority::Demand);
  // what was planned already, and what may be while the lane takes the read in
  CHECK(passed_by <= 2 * kDepth, "at most " << 2 * kDepth << " requests before it, got " << passed_by);
}

TEST(a_write_back_that_failed_gives_its_admission_back) {
  fake::Script& script = fake::new_script();
  Memory large(1000 * kBlock);  // more than may be in flight
  Engine engine(engine_options(fake::kFake, kBlock, kDepth, 2));
  for (int round = 0; round < 20; ++round) {
    script.safely([&](fake::Script& now) {
      now.judge = [=](const nvme_ops::Request&, bool) {
        return round % 2 == 0 ? fake::Verdict{0, EIO, 1} : fake::Verdict{};
      };
    });
    const auto write = job_of(Op::Write, "write", large, Priority::Writeback);
    engine.submit(write);
    wait(*write, support::never);
    CHECK_EQUAL(write->outcome()->failure().has_value(), round % 2 == 0);
  }
}

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
