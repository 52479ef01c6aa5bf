// The type `Experience`, by which the handles of one device learn together, and what they measure: a Sample for each
// transfer. Used only while holding the GIL; what other threads do when a transfer ends takes no lock.
#pragma once

#include <Python.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "base/fork.h"
#include "binding/memory.h"
#include "engine/experience.h"
#include "engine/outcome.h"

namespace nvme_ops {

struct Learner {
  explicit Learner(const Bounds& bounds) : experience(bounds) {}

  Experience experience;
  InFlight in_flight;
  unsigned long generation = fork_generation();
};

// One transfer of an engine that learns, from before it starts until it has ended.
class Sample {
public:
  using Clock = std::chrono::steady_clock;

  Sample() = default;  // of an engine that does not learn
  // `waited`: by the caller's thread. `measured`: whether its duration says what its tool is worth.
  Sample(std::shared_ptr<Learner> learner, Op op, Priority priority, const Memory* memories, std::size_t count,
         bool waited, bool measured);

  explicit operator bool() const { return use_ != nullptr; }
  const Tool& tool() const { return use_->choice.tool; }

  // When `outcome` arrives, it is no longer in flight for any handle.
  void follow(Outcome& outcome);
  // Ends it; a failed one only stops counting as in flight.
  void end(const Outcome& outcome, std::uint64_t cached);
  void end(bool succeeded, Clock::time_point when, std::uint64_t cached);

private:
  // Counts as in flight until it ends, which is noticed first either by the thread that waits or by the one that moves.
  class Flight {
  public:
    Flight(std::shared_ptr<Learner> learner, Priority priority, std::uint64_t bytes);
    ~Flight() { end(); }
    void end() noexcept;

  private:
    const std::shared_ptr<Learner> learner_;
    const Priority priority_;
    const std::uint64_t bytes_;
    const unsigned long generation_ = fork_generation();
    std::atomic<bool> ended_{false};
  };
  struct Use {
    ~Use();  // unless it was noted, it says nothing

    std::shared_ptr<Learner> learner;
    Experience::Choice choice{};
    std::uint64_t bytes = 0, beside = 0;  // its own; those of others that move meanwhile
    bool measured = false, noted = false;
    std::shared_ptr<Flight> flight{};
    Clock::time_point start{};
  };

  std::unique_ptr<Use> use_;
};

// Returns what a Python object of the type holds; null for None. Throws PythonError for anything else.
std::shared_ptr<Learner> learner_of(PyObject* object);
void add_experience_type(PyObject* module);

}  // namespace nvme_ops
