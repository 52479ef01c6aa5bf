#include "binding/gds_pins.h"

#include <string>
#include <utility>

#include "backends/cufile_driver.h"
#include "base/error.h"

namespace nvme_ops {
namespace {

constexpr int kAlreadyRegistered = 5023;  // CU_FILE_MEMORY_ALREADY_REGISTERED

}  // namespace

Pins& Pins::instance() {
  static auto* const only = new Pins;  // outlives every user
  return *only;
}

Pins::Table::iterator Pins::reaching(const std::byte* data) {
  const auto after = pins_.upper_bound(data);
  if (after == pins_.begin()) return after;
  const auto before = std::prev(after);
  return before->first + before->second.memory.bytes > data ? before : after;
}

Pins::Part Pins::part_of(const std::byte* data, std::uint64_t bytes) {
  const auto pin = reaching(data);
  if (pin == pins_.end() || pin->first >= data + bytes) return Part::None;
  return pin->first <= data && data + bytes <= pin->first + pin->second.memory.bytes ? Part::All : Part::Some;
}

void Pins::pin(Memory memory, const CuFileDriver* driver) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Part pinned = part_of(memory.data, memory.bytes);
  if (pinned == Part::All) return;
  if (pinned == Part::Some) {
    raise(system_failure(kAlreadyRegistered,
                         "registering " + std::to_string(memory.bytes) + " bytes of which some are pinned"));
  }
  if (driver != nullptr) driver->register_memory(memory.data, memory.bytes);
  const std::byte* const data = memory.data;
  pins_.emplace(data, Pin{std::move(memory), driver});
}

// Does nothing in a forked child, which must not call cuFile, or once the driver is closed.
void Pins::forget(const Pin& pin) {
  if (pin.driver != nullptr && pin.driver == CuFileDriver::current())
    pin.driver->api().deregister_memory(pin.memory.data);
}

Memory Pins::unpin(const Memory& memory) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const auto found = pins_.find(memory.data);
    if (found == pins_.end() || found->second.memory.bytes != memory.bytes) return {};
    if (found->second.users > 0 &&
        CuFileDriver::current() != nullptr) {  // in a forked child the users are the parent's
      unused_.wait(lock);
      continue;
    }
    forget(found->second);
    Memory kept = std::move(found->second.memory);
    pins_.erase(found);
    return kept;
  }
}

Pins::Part Pins::pinned(const std::byte* data, std::uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return part_of(data, bytes);
}

void Pins::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : pins_) forget(entry.second);
  pins_.clear();
}

Pins::Use::Use(const std::byte* data, std::uint64_t bytes) {
  Pins& all = instance();
  const std::lock_guard<std::mutex> lock(all.mutex_);
  for (auto pin = all.reaching(data); pin != all.pins_.end() && pin->first < data + bytes; ++pin) {
    ++pin->second.users;
    pinned_.push_back(pin->first);
  }
}

Pins::Use::~Use() {
  Pins& all = instance();
  const std::lock_guard<std::mutex> lock(all.mutex_);
  for (const std::byte* data : pinned_) --all.pins_.find(data)->second.users;
  all.unused_.notify_all();
}

}  // namespace nvme_ops
