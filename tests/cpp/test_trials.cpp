// Trials, Experience and InFlight: which tool is used next, and which one in the end.
#include <algorithm>
#include <vector>

#include "check.h"
#include "engine/experience.h"
#include "engine/trials.h"
#include "support.h"

using namespace nvme_ops;

namespace {

// Uses the tools `times` times, at these costs; returns which ones.
std::vector<std::size_t> use(Trials& trials, const std::vector<double>& costs, std::size_t times) {
  std::vector<std::size_t> used;
  for (std::size_t i = 0; i < times; ++i) {
    const Trials::Ticket ticket = trials.choose();
    used.push_back(ticket.tool);
    trials.note(ticket, 100, 100 * costs[ticket.tool]);
  }
  return used;
}

Tool handle_settings() {
  return {1 << 20, 128, 1};
}

Bounds bounds() {
  return {handle_settings(), 2, false, false, false, false, false};
}

TransferClass reads(std::uint64_t bytes) {
  return {Op::Read, size_class(bytes), Place::Pageable, false, Concurrency::Waited};
}

bool has(const std::vector<Tool>& tools, const Tool& wanted) {
  return std::find(tools.begin(), tools.end(), wanted) != tools.end();
}

Tool small_blocks() {
  Tool tool = handle_settings();
  tool.block_size /= 4;
  return tool;
}

// Reads so many times, of which `best` costs half of what the others do.
void learn(Experience& experience, const Tool& best, bool cached, int times) {
  for (int i = 0; i < times; ++i) {
    const auto choice = experience.choose(reads(64 << 20));
    experience.note(choice, 100, cached, choice.tool == best ? 50 : 100);
  }
}

}  // namespace

TEST(which_tool_is_chosen_and_how_often_it_looks) {
  struct Case {
    const char* name;
    unsigned turn, rounds;
    std::vector<std::pair<std::vector<double>, std::size_t>> uses;  // the costs, and how often
    std::size_t chosen, explorations;
  };
  for (const Case& now : {Case{"no clearly better one", 1, 3, {{{1, 0.99}, 20}}, 0, 1},
                          {"lucky in one round", 4, 2, {{{1, 0.5}, 9}, {{1, 1.1}, 8}, {{1, 1}, 1}}, 0, 1},
                          {"the first use of all is dear", 1, 3, {{{1000, 2}, 1}, {{1, 2}, 20}}, 0, 1},
                          {"costs stay", 1, 3, {{{1, 2}, 100}}, 0, 1},
                          {"its best turn was a lucky one", 1, 3, {{{1, 0.5}, 5}, {{1, 1}, 500}}, 1, 1},
                          {"a cost changes", 1, 3, {{{1, 2}, 100}, {{4, 2}, 100}}, 1, 2}}) {
    const check::Context context(now.name);
    Trials trials(2, now.turn, now.rounds);
    for (const auto& [costs, times] : now.uses) use(trials, costs, times);
    CHECK(!trials.exploring(), "it has ended");
    CHECK_EQUAL(trials.chosen(), now.chosen);
    CHECK_EQUAL(trials.explorations(), now.explorations);
  }
}

TEST(a_single_tool_is_always_used) {
  Trials trials(1, 1, 3);
  CHECK(use(trials, {1}, 5) == std::vector<std::size_t>(5, 0), "there is no other");
}

TEST(a_bad_turn_ends_early) {
  Trials trials(3, 4, 2);
  const auto used = use(trials, {1, 3, 0.9}, 50);
  CHECK_EQUAL(std::count(used.begin(), used.end(), 1U), 2);
  CHECK_EQUAL(trials.chosen(), 2U);
  CHECK(!trials.exploring(), "it has ended");
}

TEST(a_round_ends_when_its_uses_have_ended) {
  Trials trials(2, 1, 3);
  use(trials, {1, 0.5}, 1);
  const Trials::Ticket one = trials.choose(), other = trials.choose();
  CHECK_EQUAL(other.tool, 1U);
  for (int i = 0; i < 10; ++i) {
    const Trials::Ticket between = trials.choose();
    CHECK_EQUAL(between.exploration, 0U);
    trials.note(between, 1, 100);
  }
  trials.note(other, 1, 0.5);
  trials.lose(one);  // it failed
  use(trials, {1, 0.5}, 10);
  CHECK_EQUAL(trials.chosen(), 1U);
}

TEST(what_another_process_has_begun_is_not_waited_for) {
  Trials trials(2, 1, 3);
  use(trials, {1, 0.5}, 1);
  trials.choose();
  trials.forget();
  use(trials, {1, 0.5}, 20);
  CHECK(!trials.exploring(), "it has ended");
  CHECK_EQUAL(trials.chosen(), 1U);
}

TEST(a_tool_whose_use_failed_or_says_nothing_is_not_dropped) {
  for (const bool failed : {true, false}) {
    Trials trials(3, 1, 3);
    use(trials, {1, 1, 0.5}, 3);
    const Trials::Ticket ticket = trials.choose();
    CHECK_EQUAL(ticket.tool, 2U);
    failed ? trials.lose(ticket) : trials.repeat(ticket);
    use(trials, {1, 1, 0.5}, 10);
    CHECK_EQUAL(trials.chosen(), 2U);
  }
}

TEST(an_exploration_ends_even_if_nothing_can_be_measured) {
  for (const bool fail : {true, false}) {
    for (const unsigned turn : {1U, 4U}) {
      Trials trials(7, turn, turn > 1 ? 2 : 3);
      const unsigned most = 1 + 7 * turn * (turn > 1 ? 2 : 3) + 2 * 7;
      for (unsigned i = 0; i < most; ++i) {
        const Trials::Ticket ticket = trials.choose();
        fail ? trials.lose(ticket) : trials.repeat(ticket);
      }
      CHECK_EQUAL(trials.choose().exploration, 0U);
      CHECK(!trials.exploring(), "for good");
      CHECK_EQUAL(trials.chosen(), 0U);
    }
  }
}

TEST(no_write_and_no_large_read_goes_through_the_page_cache) {
  for (const std::uint64_t bytes : {4 << 10, 256 << 10, 1 << 20, 64 << 20}) {
    Tool cached = handle_settings();
    cached.cache = Cache::Buffered;
    TransferClass kind = reads(bytes);
    CHECK_EQUAL(has(tools_for(kind, bounds()), cached), bytes <= 256 << 10);
    kind.op = Op::Write;
    CHECK(!has(tools_for(kind, bounds()), cached), "its errors would be lost");
  }
}

TEST(small_reads_take_turns_of_four) {
  for (const std::uint64_t bytes : {4 << 10, 256 << 10, 1 << 20}) {
    Experience experience(bounds());
    const unsigned turn = bytes <= 256 << 10 ? 4 : 1;
    for (unsigned i = 0; i < turn + 2; ++i) {  // the very first one does not count
      const auto choice = experience.choose(reads(bytes));
      CHECK_EQUAL(choice.ticket.tool, i <= turn ? 0U : 1U);
      experience.note(choice, bytes, false, 1);
    }
  }
}

TEST(what_the_page_cache_has_is_a_class_of_its_own) {
  Experience experience(bounds());
  const auto kind = reads(64 << 20);
  const auto cold = experience.choose(kind);
  CHECK(!cold.kind.cached, "nothing is known");
  experience.note(cold, 100, true, 1);
  const auto hot = experience.choose(kind);
  CHECK(hot.kind.cached, "as the one before");
  experience.note(hot, 100, false, 1);
  CHECK(!experience.choose(kind).kind.cached, "as the one before");
  CHECK_EQUAL(experience.entries().size(), 2U);
}

TEST(a_transfer_that_is_not_measured_takes_no_turn) {
  Experience experience(bounds());
  const auto kind = reads(64 << 20);
  for (int i = 0; i < 100; ++i) {
    const auto choice = experience.choose(kind, false);
    CHECK_EQUAL(choice.ticket.exploration, 0U);
    experience.lose(choice);
    const auto measured = experience.choose(kind);
    experience.note(measured, 100, false, measured.tool.block_size < handle_settings().block_size ? 1 : 2);
  }
  const auto& trials = experience.entries().at(kind).trials;
  CHECK(!trials.exploring(), "the others have explored");
  for (const Trials::Tried& tried : trials.tried()) CHECK(tried.cost > 0, "each tool");
  CHECK(experience.choose(kind, false).tool.block_size < handle_settings().block_size, "what is known is used");
}

TEST(frozen_it_learns_nothing) {
  for (const bool known : {false, true}) {
    Experience experience(bounds());
    if (known) learn(experience, small_blocks(), false, 30);
    experience.freeze();
    for (int i = 0; i < 50; ++i) {
      const auto choice = experience.choose(reads(64 << 20));
      CHECK(choice.tool == (known ? small_blocks() : handle_settings()), "what is known");
      experience.note(choice, 100, false, 100 * i);
    }
    CHECK_EQUAL(experience.entries().size(), known ? 1U : 0U);
    if (known) CHECK_EQUAL(experience.entries().begin()->second.transfers, 30U);
  }
}

TEST(frozen_while_it_explores_it_uses_what_was_chosen_before) {
  Experience experience(bounds());
  learn(experience, handle_settings(), false, 2);
  const auto begun = experience.choose(reads(64 << 20));
  CHECK(!(begun.tool == handle_settings()), "another tool is tried");
  experience.freeze();
  experience.lose(begun);
  for (int i = 0; i < 10; ++i) CHECK(experience.choose(reads(64 << 20)).tool == handle_settings(), "nothing is chosen");
}

TEST(frozen_it_uses_the_same_tool_whatever_the_page_cache_has) {
  for (const bool cached_more : {false, true}) {
    Experience experience(bounds());
    Tool direct = handle_settings();
    direct.cache = Cache::Direct;  // a tool for what the page cache has
    learn(experience, small_blocks(), false, cached_more ? 30 : 60);
    learn(experience, direct, true, 45);
    experience.freeze();
    for (const bool cached : {true, false, true}) {
      const auto choice = experience.choose(reads(64 << 20));
      CHECK(choice.tool == (cached_more ? direct : small_blocks()), "that of most transfers");
      experience.note(choice, 100, cached, 1);
    }
  }
}

TEST(lower_priorities_are_not_counted_beside_a_transfer) {
  InFlight in_flight;
  CHECK(!in_flight.any(), "nothing yet");
  in_flight.begin(Priority::Background, 1 << 20);
  in_flight.begin(Priority::Writeback, 1 << 20);
  CHECK(in_flight.any(), "they make a crowd");
  CHECK_EQUAL(in_flight.beside(Priority::Demand, 1 << 20), 0U);
  CHECK_EQUAL(in_flight.beside(Priority::Writeback, 1 << 20), 1U << 20);
  in_flight.begin(Priority::Demand, 1 << 20);
  CHECK_EQUAL(in_flight.beside(Priority::Writeback, 1 << 20), 2U << 20);
}
