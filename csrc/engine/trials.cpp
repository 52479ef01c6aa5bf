#include "engine/trials.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace nvme_ops {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();
constexpr double kNewWeight = 0.125;  // of the latest cost in the average
constexpr unsigned kUsualUses = 16;   // uses that make the usual cost
// How many times the best cost a tool may have to stay. A first turn of one use may have paid for threads and memory.
constexpr double kStay = 1.2, kStayAfterOneUse = 2.0;
constexpr std::size_t kRepeats = 2;      // for each tool, of an exploration: then it ends, whatever was measured
constexpr unsigned kUsesOfABadTurn = 2;  // after which a turn ends early, if they cost more than kStayAfterOneUse

double cost_of(const Trials::Tried& tried) {
  return tried.cost > 0 ? tried.cost : kUnknown;
}

}  // namespace

Trials::Trials(std::size_t tools, unsigned turn, unsigned rounds) : turn_(turn), rounds_(rounds), tried_(tools) {
  explore();
}

void Trials::explore() {
  exploring_ = tried_.size() > 1;
  ++exploration_;
  round_ = 0;
  begun_ = outstanding_ = 0;
  again_.clear();
  repeats_ = kRepeats * tried_.size();
  order_.clear();
  for (std::size_t tool = 0; tool < tried_.size(); ++tool) {
    order_.push_back(tool);
    tried_[tool] = {};
  }
}

Trials::Ticket Trials::choose() {
  if (std::exchange(first_, false)) return {0, 0};
  if (exploring_) end_bad_turn();
  if (exploring_ && all_begun() && outstanding_ == 0) end_round();
  if (!exploring_ || all_begun()) return {chosen_, 0};  // the last ones of the round may not have ended yet
  ++outstanding_;
  if (begun_ < order_.size() * turn_) return {order_[begun_++ / turn_], exploration_};
  const std::size_t tool = again_.back();
  again_.pop_back();
  --repeats_;
  return {tool, exploration_};
}

bool Trials::all_begun() {
  if (begun_ < order_.size() * turn_) return false;
  while (!again_.empty() && (repeats_ == 0 || tried_[again_.back()].bytes > 0)) again_.pop_back();
  return again_.empty();
}

void Trials::end_bad_turn() {
  const std::size_t place = begun_ / turn_;
  const std::uint64_t done = begun_ % turn_;
  if (place == 0 || done < kUsesOfABadTurn) return;
  double best = kUnknown;
  for (std::size_t before = 0; before < place; ++before) best = std::min(best, turn_cost(order_[before]));
  const double present = turn_cost(order_[place]);
  if (present < kUnknown && present > kStayAfterOneUse * best) begun_ += turn_ - done;
}

double Trials::turn_cost(std::size_t tool) const {
  const Tried& tried = tried_[tool];
  return tried.bytes > 0 ? tried.turn_cost / static_cast<double>(tried.bytes) : kUnknown;
}

void Trials::lose(const Ticket& ticket) {
  if (ticket.exploration == exploration_ && outstanding_ > 0) --outstanding_;
}

void Trials::repeat(const Ticket& ticket) {
  lose(ticket);
  if (ticket.exploration == exploration_) again_.push_back(ticket.tool);
}

void Trials::note(const Ticket& ticket, std::uint64_t bytes, double cost) {
  if (bytes == 0 || !(cost > 0)) return repeat(ticket);
  if (ticket.exploration == 0) {
    if (!exploring_ && ticket.tool == chosen_) watch(cost / static_cast<double>(bytes));
    return;
  }
  if (ticket.exploration != exploration_) return;
  lose(ticket);
  Tried& tried = tried_[ticket.tool];
  tried.bytes += bytes;
  tried.turn_cost += cost;
}

void Trials::end_round() {
  const bool starting = round_ == 0 && turn_ == 1;
  for (const std::size_t number : order_) {
    Tried& tried = tried_[number];
    if (tried.bytes > 0) tried.cost = std::min(cost_of(tried), turn_cost(number));
  }
  // A tool that could not be measured stays: nothing is known against it.
  const auto known = [](double cost) { return cost < kUnknown; };
  // Where costs vary much from use to use some tool is always lucky: it must beat the first one in every round.
  const double first = order_.front() == 0 && !starting ? turn_cost(0) : kUnknown;
  const auto worse = [&](std::size_t tool) { return tool != 0 && known(turn_cost(tool)) && turn_cost(tool) >= first; };
  order_.erase(std::remove_if(order_.begin(), order_.end(), worse), order_.end());
  double best = kUnknown;
  for (const std::size_t number : order_) best = std::min(best, cost_of(tried_[number]));
  const double most = best * (starting ? kStayAfterOneUse : kStay);
  // The first tool, which all others must beat, has a second turn in any case.
  const auto drops = [&](std::size_t tool) {
    const double cost = cost_of(tried_[tool]);
    return known(cost) && cost > most && (tool != 0 || round_ > 0);
  };
  order_.erase(std::remove_if(order_.begin(), order_.end(), drops), order_.end());
  for (Tried& tried : tried_) {
    tried.bytes = 0;
    tried.turn_cost = 0;
  }
  begun_ = 0;
  if (++round_ == rounds_ || order_.size() <= 1) settle();
}

// The tools that lasted have had as many turns as one another, so that their best ones compare.
void Trials::settle() {
  exploring_ = false;
  uses_ = 0;
  usual_ = lately_ = 0;
  if (order_.empty()) return;  // nothing could be measured
  const auto cheaper = [this](std::size_t one, std::size_t other) {
    return cost_of(tried_[one]) < cost_of(tried_[other]);
  };
  chosen_ = *std::min_element(order_.begin(), order_.end(), cheaper);
  if (order_.front() == 0 && tried_[0].cost <= tried_[chosen_].cost * kMargin) chosen_ = 0;
}

void Trials::watch(double cost) {
  ++uses_;
  if (tried_.size() < 2) return;
  lately_ = lately_ == 0 ? cost : (1 - kNewWeight) * lately_ + kNewWeight * cost;
  if (usual_ == 0 && uses_ == kUsualUses) usual_ = lately_;
  const bool drifted = usual_ > 0 && (lately_ > kDrift * usual_ || lately_ * kDrift < usual_);
  if (!(drifted && uses_ >= patience_) && uses_ < kMostPatience) return;
  patience_ = drifted ? std::min(2 * patience_, kMostPatience) : kDriftUses;
  explore();
}

}  // namespace nvme_ops
