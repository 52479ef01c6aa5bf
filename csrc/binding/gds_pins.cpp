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

Pins::Table::const_iterator Pins::before(const std::byte* data) const {
  auto found = pins_.upper_bound(data);
  return found == pins_.begin() ? pins_.end() : std::prev(found);
}

Pins::Table::const_iterator Pins::around(const std::byte* data, std::uint64_t bytes) const {
  const auto found = before(data);
  return found != pins_.end() && data + bytes <= found->first + found->second.memory.bytes ? found : pins_.end();
}

void Pins::pin(Memory memory, const CuFileDriver* driver) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (around(memory.data, memory.bytes) != pins_.end()) return;
  if (borders(memory.data, memory.bytes)) {
    raise(system_failure(kAlreadyRegistered,
                         "registering " + std::to_string(memory.bytes) + " bytes of which some are pinned"));
  }
  if (driver != nullptr) driver->register_memory(memory.data, memory.bytes);
  const std::byte* const data = memory.data;
  pins_.emplace(data, Pin{std::move(memory), driver});
}

// Does nothing in a forked child, which must not call cuFile, or once the driver is closed.
void Pins::forget(const Pin& pin) {
  if (pin.driver != nullptr && pin.driver == CuFileDriver::current()) pin.driver->deregister_memory(pin.memory.data);
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

bool Pins::holds(const Memory& memory) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return around(memory.data, memory.bytes) != pins_.end();
}

bool Pins::borders_in(const std::byte* data, std::uint64_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return borders(data, bytes);
}

bool Pins::borders(const std::byte* data, std::uint64_t bytes) const {
  if (around(data, bytes) != pins_.end()) return false;
  const auto earlier = before(data);
  const auto later = pins_.lower_bound(data);
  return (earlier != pins_.end() && earlier->first + earlier->second.memory.bytes > data) ||
         (later != pins_.end() && later->first < data + bytes);
}

void Pins::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : pins_) forget(entry.second);
  pins_.clear();
}

Pins::Use::Use(const std::byte* data, std::uint64_t bytes) {
  Pins& all = instance();
  const std::lock_guard<std::mutex> lock(all.mutex_);
  auto pin = all.pins_.upper_bound(data);
  if (pin != all.pins_.begin() && std::prev(pin)->first + std::prev(pin)->second.memory.bytes > data) --pin;
  for (; pin != all.pins_.end() && pin->first < data + bytes; ++pin) {
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
