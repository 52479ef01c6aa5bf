// What the tests need and no more: named tests, checks that say what was expected, and where they stood.
#pragma once

#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"

namespace check {

// Counts and prints; the test goes on. Any thread may call it.
void failed(const char* file, int line, const std::string& message);
unsigned long failures();

// Said with every failure while it lives: the seed, the backend.
class Context {
public:
  explicit Context(std::string text);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

private:
  std::string before_;
};

struct Registered {
  Registered(const char* name, void (*run)());
};

// Says that something was not tested here, and why.
void skipped(const std::string& reason);

// A positive number from the environment.
unsigned long from_environment(const char* name, unsigned long otherwise);

// The failure that `action` raised as an IoError.
template <class Action>
std::optional<nvme_ops::Failure> failure_of(Action&& action) {
  try {
    action();
  } catch (const nvme_ops::IoError& error) {
    return error.failure();
  }
  return std::nullopt;
}

std::string described(const std::optional<nvme_ops::Failure>& failure);
void failure_is(const char* file, int line, const std::optional<nvme_ops::Failure>& failure,
                nvme_ops::Failure::Kind kind, int error, std::string_view words);

template <class Value>
std::string text(const Value& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

}  // namespace check

#define TEST(name)                                               \
  static void name();                                            \
  static const check::Registered registered_##name(#name, name); \
  static void name()

// The expectation is a stream: CHECK(bytes <= bound, "at most " << bound << " bytes, got " << bytes)
#define CHECK(condition, expectation)                                        \
  do {                                                                       \
    if (condition) break;                                                    \
    std::ostringstream check_stream;                                         \
    check_stream << "expected " << expectation << " (" << #condition << ")"; \
    check::failed(__FILE__, __LINE__, check_stream.str());                   \
  } while (false)

#define CHECK_EQUAL(actual, wanted)                                                                   \
  do {                                                                                                \
    const auto check_actual = (actual);                                                               \
    const decltype(check_actual) check_wanted = (wanted);                                             \
    if (check_actual == check_wanted) break;                                                          \
    check::failed(__FILE__, __LINE__,                                                                 \
                  std::string("expected " #actual " to be ") + check::text(check_wanted) + ", not " + \
                      check::text(check_actual));                                                     \
  } while (false)

// A failure of this kind and errno whose message contains `words`.
#define CHECK_FAILURE(failure, kind, error, words) \
  check::failure_is(__FILE__, __LINE__, failure, nvme_ops::Failure::Kind::kind, error, words)
