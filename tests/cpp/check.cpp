#include "check.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

namespace check {
namespace {

struct Test {
  const char* name;
  void (*run)();
};

constexpr unsigned kHangSeconds = 240;       // a test that takes this long hangs
constexpr unsigned long kMostMessages = 30;  // what follows says nothing new

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

std::mutex mutex;
std::string context;
unsigned long count = 0;
const char* volatile running = "";

void hangs(int) {
  const char message[] = "FAILED: hangs in ";
  static_cast<void>(!::write(STDOUT_FILENO, message, sizeof message - 1));
  static_cast<void>(!::write(STDOUT_FILENO, running, std::strlen(running)));
  static_cast<void>(!::write(STDOUT_FILENO, "\n", 1));
  ::_exit(3);
}

const char* name_of(nvme_ops::Failure::Kind kind) {
  static const char* const names[] = {"System",      "EndOfFile", "Argument",    "Memory",
                                      "Interrupted", "Mismatch",  "Unavailable", "Internal"};
  return names[static_cast<std::size_t>(kind)];
}

}  // namespace

void failed(const char* file, int line, const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (++count > kMostMessages) return;
  const char* const slash = std::strrchr(file, '/');
  std::printf("FAILED %s:%d in %s: %s%s%s\n", slash != nullptr ? slash + 1 : file, line, running, message.c_str(),
              context.empty() ? "" : " with ", context.c_str());
  std::fflush(stdout);
}

unsigned long failures() {
  const std::lock_guard<std::mutex> lock(mutex);
  return count;
}

Context::Context(std::string text) {
  const std::lock_guard<std::mutex> lock(mutex);
  before_ = context;
  context += (context.empty() ? "" : ", ") + text;
}

Context::~Context() {
  const std::lock_guard<std::mutex> lock(mutex);
  context = before_;
}

Registered::Registered(const char* name, void (*run)()) {
  tests().push_back({name, run});
}

void skipped(const std::string& reason) {
  std::printf("  skipped in %s: %s\n", running, reason.c_str());
}

unsigned long from_environment(const char* name, unsigned long otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoul(text, nullptr, 10) : otherwise;
}

std::string described(const std::optional<nvme_ops::Failure>& failure) {
  if (!failure) return "no failure";
  return std::string(name_of(failure->kind)) + " " + std::to_string(failure->error) + " '" + failure->message + "'";
}

void failure_is(const char* file, int line, const std::optional<nvme_ops::Failure>& failure,
                nvme_ops::Failure::Kind kind, int error, std::string_view words) {
  if (failure && failure->kind == kind && failure->error == error &&
      failure->message.find(words) != std::string::npos) {
    return;
  }
  failed(file, line,
         std::string("expected a failure ") + name_of(kind) + " " + std::to_string(error) + " with '" +
             std::string(words) + "', not " + described(failure));
}

}  // namespace check

// Runs the tests named, or all.
int main(int count, char** names) {
  ::signal(SIGALRM, check::hangs);
  unsigned long run = 0;
  for (const check::Test& test : check::tests()) {
    bool wanted = count < 2;
    for (int i = 1; i < count; ++i) wanted = wanted || std::strcmp(names[i], test.name) == 0;
    if (!wanted) continue;
    ++run;
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
  ::alarm(0);
  if (run == 0) std::printf("no test has that name\n");
  return run == 0 || check::failures() > 0 ? 1 : 0;
}
