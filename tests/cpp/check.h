// What the tests need and no more: named tests, checks that say what was expected, and where they stood. Each program
// is one source file, which includes this one.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

constexpr unsigned kHangSeconds = 240;       // a test that takes this long hangs
constexpr unsigned long kMostMessages = 30;  // what follows says nothing new

inline std::vector<Test> tests;
inline std::mutex mutex;
inline std::string context;
inline unsigned long count = 0;
inline const char* volatile running = "";

struct Registered {
  Registered(const char* name, void (*run)()) { tests.push_back({name, run}); }
};

// Counts and prints; the test goes on. Any thread may call it.
inline void failed(const char* file, int line, const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (++count > kMostMessages) return;
  std::printf("FAILED %s:%d in %s: %s%s%s\n", file, line, running, message.c_str(), context.empty() ? "" : " with ",
              context.c_str());
  std::fflush(stdout);
}

inline unsigned long failures() {
  const std::lock_guard<std::mutex> lock(mutex);
  return count;
}

// Said with every failure while it lives: the seed, the backend.
class Context {
public:
  explicit Context(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex);
    before_ = context;
    context += (context.empty() ? "" : ", ") + text;
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    const std::lock_guard<std::mutex> lock(mutex);
    context = before_;
  }

private:
  std::string before_;
};

// Says that something was not tested here, and why.
inline void skipped(const std::string& reason) {
  std::printf("  skipped in %s: %s\n", running, reason.c_str());
}

// A positive number from the environment.
inline unsigned long from_environment(const char* name, unsigned long otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoul(text, nullptr, 10) : otherwise;
}

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

inline const char* name_of(nvme_ops::Failure::Kind kind) {
  static const char* const names[] = {"System",      "EndOfFile", "Argument",    "Memory",
                                      "Interrupted", "Mismatch",  "Unavailable", "Internal"};
  return names[static_cast<std::size_t>(kind)];
}

inline std::string described(const std::optional<nvme_ops::Failure>& failure) {
  if (!failure) return "no failure";
  return std::string(name_of(failure->kind)) + " " + std::to_string(failure->error) + " '" + failure->message + "'";
}

inline void failure_is(const char* file, int line, const std::optional<nvme_ops::Failure>& failure,
                       nvme_ops::Failure::Kind kind, int error, std::string_view words) {
  if (failure && failure->kind == kind && failure->error == error &&
      failure->message.find(words) != std::string::npos) {
    return;
  }
  failed(file, line,
         std::string("expected a failure ") + name_of(kind) + " " + std::to_string(error) + " with '" +
             std::string(words) + "', not " + described(failure));
}

template <class Value>
std::string text(const Value& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

inline void hangs(int) {
  const std::string_view parts[] = {"FAILED: hangs in ", running, "\n"};
  for (const std::string_view part : parts) static_cast<void>(!::write(STDOUT_FILENO, part.data(), part.size()));
  ::_exit(3);
}

}  // namespace check

// Runs the tests named, or all.
int main(int count, char** names) {
  ::signal(SIGALRM, check::hangs);
  bool any = false;
  for (const check::Test& test : check::tests) {
    bool wanted = count < 2;
    for (int i = 1; i < count; ++i) wanted = wanted || std::strcmp(names[i], test.name) == 0;
    if (!wanted) continue;
    any = true;
    check::running = test.name;
    ::alarm(check::kHangSeconds);
    const unsigned long before = check::failures();
    try {
      test.run();
    } catch (const std::exception& error) {
      check::failed(__FILE__, __LINE__, std::string("expected no exception, got '") + error.what() + "'");
    }
    std::printf("%s %s\n", check::failures() == before ? "passed" : "FAILED", test.name);
    std::fflush(stdout);
  }
  if (!any) std::printf("no test has that name\n");
  return !any || check::failures() > 0 ? 1 : 0;
}

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
