// Memory of accelerators registered with cuFile.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "binding/memory.h"

namespace nvme_ops {

class CuFileDriver;

class Pins {
public:
  static Pins& instance();

  // With the GIL. The memory stays until it is unpinned: cuFile wants to forget it before it is freed. Nothing happens
  // where it is pinned already; where only part of it is, throws IoError as cuFile would. Without a driver it is only
  // kept in mind.
  void pin(Memory memory, const CuFileDriver* driver);

  // Without the GIL: waits for the transfers that use it. Empty when exactly this memory was not pinned. What comes
  // back is let go of with the GIL.
  Memory unpin(const Memory& memory);

  bool holds(const Memory& memory) const;

  // Whether only part of a range is pinned, or parts by different pins: cuFile takes no transfer across such a border.
  bool borders_in(const std::byte* data, std::uint64_t bytes) const;

  // At exit, with the GIL, when nothing is in flight.
  void clear();

  // Of all that is pinned in a range, for the length of a transfer.
  class Use {
  public:
    Use(const std::byte* data, std::uint64_t bytes);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();

  private:
    std::vector<const std::byte*> pinned_;
  };

private:
  struct Pin {
    Memory memory;
    const CuFileDriver* driver;  // that knows it, or null
    unsigned users = 0;
  };
  using Table = std::map<const std::byte*, Pin>;

  static void forget(const Pin& pin);

  // The one that begins at `data` or last before it.
  Table::const_iterator before(const std::byte* data) const;
  bool borders(const std::byte* data, std::uint64_t bytes) const;
  Table::const_iterator around(const std::byte* data, std::uint64_t bytes) const;

  mutable std::mutex mutex_;
  std::condition_variable unused_;
  Table pins_;
};

}  // namespace nvme_ops
