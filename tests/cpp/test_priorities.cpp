// Priorities in an engine: what is urgent passes what is under way, and what is not ends all the same.
#include <chrono>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/engine.h"
#include "fake_backend.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

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

TEST(a_write_back_ends_while_demand_goes_on) {
  fake::new_script();
  Memory large(64 * kBlock), small(kBlock);
  support::write_file(directory() / "read", support::pattern(kBlock, 1));
  Engine engine(engine_options(fake::kFake, kBlock, kDepth, 1));
  const auto write = job_of(Op::Write, "write", large, Priority::Background);
  engine.submit(write);
  while (!write->outcome()->done()) {
    const auto read = job_of(Op::Read, "read", small, Priority::Demand);
    engine.submit(read);
    wait(*read, support::never);
  }
  CHECK(!write->outcome()->failure(), "it to end well");
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
