// Decides which share a lane plans next: the highest priority first; within one, shares take turns; and a lower one
// gets a piece after every kPatientPieces of higher ones. A pure decision that knows no file, no queue and no clock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <list>

#include "base/io.h"

namespace nvme_ops {

// Item has `priority() const`, `turn` and `self`, its iterator. Items only move between lists, which allocates nothing.
template <class Item>
class Schedule {
public:
  using Items = std::list<Item>;

  static constexpr unsigned kTurn = 16;              // pieces of one share before the next one's turn
  static constexpr unsigned kPatientPieces = 64;     // of higher priorities, before a lower one gets one
  static constexpr std::size_t kMaxPassedOver = 16;  // shares of a priority that are tried in one pass

  void add(Items items) noexcept {
    while (!items.empty()) {
      Level& level = level_of(items.front());
      level.items.splice(level.items.end(), items, items.begin());
    }
  }

  bool empty() const {
    return std::all_of(levels_.begin(), levels_.end(), [](const Level& level) { return level.items.empty(); });
  }

  // Begins a pass, in which each share is returned until it is passed over.
  void begin() {
    for (Level& level : levels_) level.passed_over = 0;
  }

  // Returns the next share to plan; null if there is none, or all were passed over.
  Item* next() {
    Level* chosen = nullptr;
    for (Level& level : levels_) {
      if (!askable(level)) continue;
      if (chosen == nullptr || level.waited >= kPatientPieces) chosen = &level;
    }
    return chosen == nullptr ? nullptr : &chosen->items.front();
  }

  // Call when a piece of the item from next() was planned.
  void planned(Item& item) {
    Level& own = level_of(item);
    own.waited = 0;
    for (Level* level = &own + 1; level != levels_.data() + levels_.size(); ++level) {
      level->waited += level->items.empty() ? 0 : 1;
    }
    if (++item.turn == kTurn) to_the_end(item);
  }

  // Call when the item from next() cannot be planned now.
  void pass_over(Item& item) {
    ++level_of(item).passed_over;
    to_the_end(item);
  }

  // Removes an item that has nothing more to plan.
  void release(Item& item, Items& to) { to.splice(to.end(), level_of(item).items, item.self); }

private:
  struct Level {
    Items items;
    std::size_t passed_over = 0;  // items at the end of the list, in this pass
    unsigned waited = 0;          // pieces of higher priorities since its last one
  };

  static bool askable(const Level& level) { return level.passed_over < std::min(level.items.size(), kMaxPassedOver); }
  Level& level_of(const Item& item) { return levels_[static_cast<std::size_t>(item.priority())]; }
  void to_the_end(Item& item) {
    item.turn = 0;
    Items& items = level_of(item).items;
    items.splice(items.end(), items, item.self);
  }

  std::array<Level, kPriorities> levels_;
};

}  // namespace nvme_ops
