// The type `Experience`, by which the handles of one device learn together, and what they measure: a Sample for each
// transfer. Everything here is used only while holding the GIL, so a forked child finds it consistent.
#pragma once

#include <Python.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "binding/memory.h"
#include "engine/experience.h"
#include "engine/outcome.h"

namespace nvme_ops {

// Counters of energy, as the kernel shows them: files of microjoules that wrap around.
class EnergyMeter {
public:
  void add(std::string path, std::uint64_t most) { counters_.push_back({std::move(path), most}); }
  bool empty() const { return counters_.empty(); }
  std::vector<std::uint64_t> read() const;  // empty if one cannot be read
  // Returns the joules between two readings; 0 if unknown.
  double between(const std::vector<std::uint64_t>& start, const std::vector<std::uint64_t>& end) const;

private:
  struct Counter {
    std::string path;
    std::uint64_t most;
  };
  std::vector<Counter> counters_;
};

struct Learner {
  Learner(const Bounds& bounds, bool frozen, EnergyMeter energy)
      : experience(bounds, frozen), meter(std::move(energy)) {}

  Experience experience;
  const EnergyMeter meter;
  std::uint64_t in_flight = 0;  // bytes
  unsigned long generation = fork_generation();
};

// One transfer of an engine that learns, from before it starts until it has ended.
class Sample {
public:
  using Clock = std::chrono::steady_clock;

  Sample() = default;  // of an engine that does not learn
  // `waited`: by the caller's thread. `measured`: whether its duration says what its tool is worth.
  Sample(std::shared_ptr<Learner> learner, Op op, const Memory* memories, std::size_t count, bool waited,
         bool measured);
  Sample(Sample&& other) noexcept;
  Sample& operator=(Sample&& other) noexcept;
  ~Sample() { drop(); }

  explicit operator bool() const { return learner_ != nullptr; }
  const Tool& tool() const { return choice_.tool; }

  // Reads the meter, if there is one, when `outcome` arrives.
  void meter(Outcome& outcome);
  // Ends it; a failed one only stops counting as in flight.
  void end(const Outcome& outcome, std::uint64_t cached);
  void end(bool succeeded, Clock::time_point when, std::uint64_t cached);

private:
  struct Reading {
    std::atomic<bool> done{false};
    std::vector<std::uint64_t> values;
  };

  void drop() noexcept;

  std::shared_ptr<Learner> learner_;
  Experience::Choice choice_{};
  std::uint64_t bytes_ = 0, ahead_ = 0;  // its own; of others, in flight when it began
  bool measured_ = false;
  unsigned long generation_ = 0;
  Clock::time_point start_;
  std::vector<std::uint64_t> meter_start_;
  std::shared_ptr<Reading> meter_end_;
};

// Returns what a Python object of the type holds; null for None. Throws PythonError for anything else.
std::shared_ptr<Learner> learner_of(PyObject* object);
bool add_experience_type(PyObject* module);

}  // namespace nvme_ops
