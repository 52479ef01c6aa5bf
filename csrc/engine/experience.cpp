#include "engine/experience.h"

#include <utility>

#include "base/limits.h"

namespace nvme_ops {
namespace {

constexpr std::uint64_t kSmallestClass = 4 << 10;
constexpr std::uint8_t kLatencyBound = 3;  // up to 256 KiB: latency decides
constexpr std::uint8_t kFewBlocks = 4;     // up to 1 MiB
constexpr std::uint8_t kManyRequests = 7;  // from 16 MiB on
constexpr std::uint64_t kShallow = 16;

// Small reads in a row share what the page cache reads ahead, so it takes several to see what one costs.
unsigned turn_of(const TransferClass& kind) {
  return kind.size <= kLatencyBound || kind.concurrency == Concurrency::Crowd ? 4 : 1;
}

unsigned rounds_of(const TransferClass& kind) {
  return turn_of(kind) > 1 ? 2 : 3;
}

}  // namespace

std::uint8_t size_class(std::uint64_t bytes) {
  std::uint8_t size = 0;
  for (std::uint64_t most = kSmallestClass; bytes > most && size + 1 < kSizeClasses; most *= 4) ++size;
  return size;
}

std::vector<Tool> tools_for(const TransferClass& kind, const Bounds& bounds) {
  std::vector<Tool> tools{bounds.first};
  const auto add = [&](auto&& change) {
    Tool tool = bounds.first;
    change(tool);
    if (std::find(tools.begin(), tools.end(), tool) == tools.end()) tools.push_back(tool);
  };
  const bool device = kind.place == Place::Device, read = kind.op == Op::Read;
  if (device && bounds.cufile) add([](Tool& tool) { tool.bounce = true; });
  // Reads only: a cached write's error would come too late. Small ones only: large ones would drive out others' data.
  if (kind.size <= kLatencyBound && !device && read && !bounds.cache_fixed) {
    add([](Tool& tool) { tool.cache = Cache::Buffered; });
  }
  if (kind.size <= kLatencyBound) return tools;
  if (!bounds.block_size_fixed) {
    add([](Tool& tool) { tool.block_size = std::max(tool.block_size / 4, kPageSize); });
    if (kind.size > kFewBlocks) add([](Tool& tool) { tool.block_size *= 4; });
  }
  if (!bounds.lanes_fixed && kind.size > kFewBlocks) add([&](Tool& tool) { tool.lanes = bounds.lanes; });
  if (!bounds.queue_depth_fixed && kind.size >= kManyRequests) {
    add([](Tool& tool) { tool.queue_depth = std::min(tool.queue_depth, kShallow); });
  }
  if (kind.place == Place::Aligned) add([](Tool& tool) { tool.in_place = true; });
  if (kind.cached && !device && !bounds.cache_fixed) add([](Tool& tool) { tool.cache = Cache::Direct; });
  return tools;
}

Experience::Entry& Experience::entry_of(const TransferClass& kind) {
  const auto found = entries_.find(kind);
  if (found != entries_.end()) return found->second;
  std::vector<Tool> tools = tools_for(kind, bounds_);
  const std::size_t count = tools.size();
  return entries_.emplace(kind, Entry{std::move(tools), Trials(count, turn_of(kind), rounds_of(kind))}).first->second;
}

// Whether the page cache has the bytes is not tracked either: the class with more transfers, of the two, decides.
Experience::Choice Experience::known(TransferClass kind) const {
  const Entry* best = nullptr;
  for (const bool cached : {false, true}) {
    kind.cached = cached;
    const auto found = entries_.find(kind);
    if (found != entries_.end() && (!best || found->second.transfers > best->transfers)) best = &found->second;
  }
  return {kind, best ? best->tools[best->trials.chosen()] : bounds_.first, {}};
}

Experience::Choice Experience::choose(TransferClass kind, bool measured) {
  kind.cached = false;
  if (frozen_) return known(kind);
  const auto seen = cached_.find(kind);
  kind.cached = seen != cached_.end() && seen->second;
  Entry& entry = entry_of(kind);
  ++entry.transfers;
  const Trials::Ticket ticket = measured ? entry.trials.choose() : Trials::Ticket{entry.trials.chosen(), 0};
  return {kind, entry.tools[ticket.tool], ticket};
}

void Experience::note(const Choice& choice, std::uint64_t bytes, bool cached, double cost) {
  if (frozen_) return;
  if (choice.kind.op == Op::Read && choice.tool.cache == Cache::Auto && choice.kind.place != Place::Device) {
    TransferClass without = choice.kind;
    without.cached = false;
    cached_[without] = cached;
    if (cached != choice.kind.cached) cost = 0;  // it says nothing about this class
  }
  entry_of(choice.kind).trials.note(choice.ticket, bytes, cost);
}

void Experience::lose(const Choice& choice) {
  if (!frozen_) entry_of(choice.kind).trials.lose(choice.ticket);
}

void Experience::forget() {
  for (auto& [kind, entry] : entries_) entry.trials.forget();
}

}  // namespace nvme_ops
