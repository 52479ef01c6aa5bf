// engine().admit(): little of lower priority is in flight while somebody waits.
#include <chrono>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/admission.h"
#include "support.h"

using namespace nvme_ops;

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

TEST(demand_is_always_admitted) {
  CHECK_EQUAL(admitted(Priority::Demand), std::uint64_t{1000});
}

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

TEST(engines_do_not_share_what_may_be_in_flight) {
  let_demand_pass();
  CHECK(engine().admit(Priority::Writeback, kDeferableBytes), "all of one engine's");
  Admission other;
  CHECK(other.admit(Priority::Writeback, kDeferableBytes), "and all of another one's");
  other.finish(Priority::Writeback, kDeferableBytes);
  engine().finish(Priority::Writeback, kDeferableBytes);
}

TEST(one_request_however_large_is_admitted_when_it_is_alone) {
  note_demand();
  CHECK(engine().admit(Priority::Background, 10 * kDeferableBytes), "the only one");
  CHECK(!engine().admit(Priority::Background, 1), "no second one");
  engine().finish(Priority::Background, 10 * kDeferableBytes);
}

TEST(io_priorities_are_those_of_the_kernel) {
  CHECK_EQUAL(io_priority(Priority::Demand), std::uint16_t{0});  // the process's own
  CHECK_EQUAL(io_priority(Priority::Prefetch), std::uint16_t{2 << 13 | 5});
  CHECK_EQUAL(io_priority(Priority::Writeback), std::uint16_t{2 << 13 | 6});
  CHECK_EQUAL(io_priority(Priority::Background), std::uint16_t{2 << 13 | 7});
}
