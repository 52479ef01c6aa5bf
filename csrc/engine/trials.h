// Which of several tools costs least, found by using them: a few rounds in which the worst drop out, then the best
// alone, until its cost changes or much time has passed. A pure decision, for one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nvme_ops {

class Trials {
public:
  // Says what a use counts towards. `exploration` 0: only the cost of the tool in use.
  struct Ticket {
    std::size_t tool = 0;
    std::uint64_t exploration = 0;
  };
  struct Tried {
    double cost = 0;       // of a byte, in its best turn; 0 before the first
    double turn_cost = 0;  // of the present turn
    std::uint64_t bytes = 0;
  };

  static constexpr double kMargin = 1.03;          // by which a tool's best turn must be better than the first one's
  static constexpr unsigned kDriftUses = 32;       // after which a changed cost starts an exploration
  static constexpr unsigned kMostPatience = 1024;  // uses after which an exploration starts in any case
  static constexpr double kDrift = 1.5;            // times the cost, or a part of it, that counts as a change

  // The first tool is the one to prefer without experience. A turn is so many uses in a row.
  Trials(std::size_t tools, unsigned turn, unsigned rounds);

  // Returns the tool to use now. Every ticket is given back by note(), repeat() or lose(), unless forget() was called.
  Ticket choose();
  void note(const Ticket& ticket, std::uint64_t bytes, double cost);
  void repeat(const Ticket& ticket);  // the use measured nothing: a tool without a cost gets another, a few times
  void lose(const Ticket& ticket);    // the use failed, perhaps because of the tool, which gets no other
  void forget() { outstanding_ = 0; }

  bool exploring() const { return exploring_; }
  std::size_t chosen() const { return chosen_; }
  std::uint64_t explorations() const { return exploration_; }
  const std::vector<Tried>& tried() const { return tried_; }

private:
  void explore();
  void end_bad_turn();
  void end_round();
  void settle();
  void watch(double cost);
  bool all_begun();                          // also what is repeated
  double turn_cost(std::size_t tool) const;  // of a byte, in the present turn; infinite before its first use

  const unsigned turn_, rounds_;
  std::vector<Tried> tried_;
  std::size_t chosen_ = 0;
  bool first_ = true;  // the very first use pays for threads and memory: it counts for no tool
  bool exploring_ = false;
  std::uint64_t exploration_ = 0;  // the number of explorations begun
  // Of the present exploration
  std::vector<std::size_t> order_;  // tools of the present round, in their order
  unsigned round_ = 0;
  std::uint64_t begun_ = 0;         // uses in the present round
  std::uint64_t outstanding_ = 0;   // tickets of it that were not given back
  std::vector<std::size_t> again_;  // tools of uses that say nothing, repeated when all others of the round have begun
  std::size_t repeats_ = 0;         // that are left
  // Of the tool in use
  std::uint64_t uses_ = 0;
  unsigned patience_ = kDriftUses;
  double usual_ = 0, lately_ = 0;  // cost of a byte, not in the best turn; 0: not known yet
};

}  // namespace nvme_ops
