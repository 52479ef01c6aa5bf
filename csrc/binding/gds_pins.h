// Memory of accelerators registered with cuFile.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "binding/memory.h"

namespace nvme_ops {

class CuFileDriver;

class Pins {
public:
  static Pins& instance();

  // Call with the GIL. Keeps the memory alive until it is unpinned; does nothing if it is pinned already. Throws
  // IoError, as cuFile would, if only part of it is. Without a driver it is only remembered.
  void pin(Memory memory, const CuFileDriver* driver);

  // Call without the GIL: waits for the transfers that use it. Empty unless exactly this memory was pinned.
  Memory unpin(const Memory& memory);

  // How much of a range one pin covers. Some: or different pins do; cuFile refuses transfers across such a border.
  enum class Part : std::uint8_t { None, Some, All };
  Part pinned(const std::byte* data, std::uint64_t bytes);

  // Call at exit with the GIL, when nothing is in flight.
  void clear();

  // Marks every pin in a range as in use, for the length of a transfer.
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
    const CuFileDriver* driver;  // that it is registered with, or null
    unsigned users = 0;
  };
  using Table = std::map<const std::byte*, Pin>;

  static void forget(const Pin& pin);

  Table::iterator reaching(const std::byte* data);  // the first that ends after `data`
  Part part_of(const std::byte* data, std::uint64_t bytes);

  std::mutex mutex_;
  std::condition_variable unused_;
  Table pins_;
};

}  // namespace nvme_ops
