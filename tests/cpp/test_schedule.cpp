// Schedule: whose turn it is, without a file, a queue or a clock.
#include <string>
#include <vector>

#include "check.h"
#include "engine/schedule.h"
#include "support.h"

using namespace nvme_ops;
using support::Random;

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

TEST(demand_comes_before_all_that_was_there_already) {
  Shares shares;
  add(shares, 'w', Priority::Writeback, 1000);
  CHECK_EQUAL(planned(shares, 5), std::string("wwwww"));
  add(shares, 'd', Priority::Demand, 3);
  CHECK_EQUAL(planned(shares, 4), std::string("dddw"));
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

TEST(of_very_many_only_some_are_asked_in_one_pass) {
  Shares shares;
  for (unsigned i = 0; i < 100; ++i) add(shares, 'a', Priority::Demand, 1);
  shares.begin();
  std::size_t asked = 0;
  while (Item* const item = shares.next()) {
    ++asked;
    shares.pass_over(*item);
  }
  CHECK_EQUAL(asked, Shares::kMaxPassedOver);
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
