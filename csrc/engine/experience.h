// What adaptive handles have learned about each class of transfers. Used by one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "base/io.h"
#include "engine/tool.h"
#include "engine/trials.h"

namespace nvme_ops {

// Where a tensor lies: at an address that direct I/O allows, or not; in huge or page-locked pages; on a device.
enum class Place : std::uint8_t { Pageable, Aligned, Pinned, Device };

// Waited: by the caller's thread, alone in flight. Alone: by a lane's. Crowd: more is in flight, or many are in a call.
enum class Concurrency : std::uint8_t { Waited, Alone, Crowd };

struct TransferClass {
  Op op;
  std::uint8_t size;  // see size_class()
  Place place;
  bool cached;  // the page cache has most of it; not known beforehand, so taken from the transfer before
  Concurrency concurrency;

  std::array<unsigned, 5> fields() const {
    return {static_cast<unsigned>(op), size, static_cast<unsigned>(place), cached, static_cast<unsigned>(concurrency)};
  }
  friend bool operator<(const TransferClass& one, const TransferClass& other) { return one.fields() < other.fields(); }
};

inline constexpr std::uint8_t kSizeClasses = 10;  // up to 4 KiB, 16 KiB, ..., 256 MiB, and more

std::uint8_t size_class(std::uint64_t bytes);

// What the tools of a class are made from.
struct Bounds {
  Tool first;           // the handle's own settings, and the tool to prefer without experience
  std::uint64_t lanes;  // the most that it pays to try
  bool block_size_fixed, queue_depth_fixed, lanes_fixed, cache_fixed;  // given by the user
  bool cufile;                                                         // accelerator tensors have another path
};

// Returns the tools to try for a class, bounds.first before all others.
std::vector<Tool> tools_for(const TransferClass& kind, const Bounds& bounds);

class Experience {
public:
  struct Entry {
    std::vector<Tool> tools;
    Trials trials;
    std::uint64_t transfers = 0;
  };
  struct Choice {
    TransferClass kind;
    Tool tool;
    Trials::Ticket ticket;
  };

  explicit Experience(Bounds bounds) : bounds_(bounds) {}

  const Bounds& bounds() const { return bounds_; }
  bool frozen() const { return frozen_; }
  // From now on what is known is used and nothing is learned.
  void freeze() { frozen_ = true; }

  // Returns what to use for a transfer; ignores `kind.cached`. Every choice is given back by note() or lose(). One that
  // will not be `measured` takes no other tool's turn. Frozen, it depends on the class alone.
  Choice choose(TransferClass kind, bool measured = true);
  // Records what so many bytes cost, in seconds; `cached`: the page cache had most of them.
  void note(const Choice& choice, std::uint64_t bytes, bool cached, double cost);
  void lose(const Choice& choice);
  // No choice made so far will be given back: they are another process's.
  void forget();

  const std::map<TransferClass, Entry>& entries() const { return entries_; }

private:
  Entry& entry_of(const TransferClass& kind);
  Choice known(TransferClass kind) const;

  const Bounds bounds_;
  bool frozen_ = false;
  std::map<TransferClass, Entry> entries_;
  std::map<TransferClass, bool> cached_;  // by class without `cached`: whether the latest transfer was
};

// Counts, by size, the bytes that the transfers of all handles of one device have in flight: a further transfer shares
// the device with these. Transfers end on any thread, and a process may fork meanwhile: there is no lock.
class InFlight {
public:
  void begin(Priority priority, std::uint64_t bytes) noexcept {
    Some& some = some_of(priority, bytes);
    some.transfers += 1;
    some.bytes += bytes;
  }
  void end(Priority priority, std::uint64_t bytes) noexcept {
    Some& some = some_of(priority, bytes);
    some.transfers -= 1;
    some.bytes -= bytes;
  }

  bool any() const noexcept {
    return std::any_of(some_.begin(), some_.end(), [](const auto& sizes) {
      return std::any_of(sizes.begin(), sizes.end(), [](const Some& some) { return some.transfers > 0; });
    });
  }

  // Returns the bytes of others that move while `bytes` of this priority do: lower priorities are overtaken, and of a
  // larger transfer at most as much moves (engine/schedule.h).
  std::uint64_t beside(Priority priority, std::uint64_t bytes) const noexcept {
    std::uint64_t sum = 0;
    for (std::size_t urgent = 0; urgent <= static_cast<std::size_t>(priority); ++urgent) {
      for (const Some& some : some_[urgent]) sum += std::min<std::uint64_t>(some.bytes, some.transfers * bytes);
    }
    return sum;
  }

  // What is in flight is another process's.
  void forget() noexcept {
    for (auto& sizes : some_) {
      for (Some& some : sizes) some.transfers = some.bytes = 0;
    }
  }

private:
  struct Some {
    std::atomic<std::uint64_t> transfers{0}, bytes{0};
  };

  Some& some_of(Priority priority, std::uint64_t bytes) noexcept {
    return some_[static_cast<std::size_t>(priority)][nvme_ops::size_class(bytes)];
  }

  std::array<std::array<Some, kSizeClasses>, kPriorities> some_;
};

}  // namespace nvme_ops
