// What the doubles have in common: switches by which a test steers one and counts by which it watches it, in memory
// that the test sees as a structure of ctypes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace doubles {

using Number = std::atomic<std::int64_t>;

// The calls of one function; the order is that of Calls in __init__.py.
struct Calls {
  Number made, held_up;               // so far; waiting now
  Number held;                        // whether they have to wait
  Number first, count;                // those from now on that go wrong; count < 0: all from the first on
  Number result, error, most, delay;  // how: what is returned, errno, bytes moved at most, milliseconds
};

struct Fault {
  std::int64_t result = 0, error = 0, most = -1;  // negative: no limit
};

// Unnamed, so that two libraries in one process share nothing.
namespace {

std::mutex mutex;
std::string& violations = *new std::string;  // never destroyed: tensors and a driver that hangs outlive everything

using Lock = std::unique_lock<std::mutex>;

void violation(const std::string& what) {
  violations += what + "\n";
}

bool overlap(const void* one, std::size_t bytes, const void* other, std::size_t length) {
  const auto* const start = static_cast<const char*>(one);
  const auto* const another = static_cast<const char*>(other);
  return start < another + length && another < start + bytes;
}

// Counts the call, and holds it up and delays it as it was asked; how it goes wrong.
Fault enter(Lock& lock, Calls& calls) {
  ++calls.made;
  Fault met;
  std::chrono::milliseconds delay{0};
  if (calls.count != 0 && --calls.first <= 0) {
    if (calls.count > 0) --calls.count;
    met = {calls.result, calls.error, calls.most};
    delay = std::chrono::milliseconds(calls.delay);
  }
  ++calls.held_up;
  if (calls.held != 0 || delay.count() > 0) {
    lock.unlock();
    while (calls.held != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(delay);
    lock.lock();
  }
  --calls.held_up;
  return met;
}

}  // namespace
}  // namespace doubles

extern "C" const char* violations_so_far() {
  const doubles::Lock lock(doubles::mutex);
  return doubles::violations.c_str();
}
