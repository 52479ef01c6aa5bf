// Failures as data: what a caller needs to know, kept until the thread that asked can raise it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>

#include "base/io.h"

namespace nvme_ops {

struct Failure {
  // Unavailable: the system lacks what was asked for. Internal: a bug of ours.
  enum class Kind : std::uint8_t { System, EndOfFile, Argument, Memory, Interrupted, Mismatch, Unavailable, Internal };
  Kind kind;
  int error;  // errno, where there is one
  std::string message;
  std::string path;
};

class IoError : public std::exception {
public:
  explicit IoError(Failure failure) : failure_(std::move(failure)) {}
  const Failure& failure() const noexcept { return failure_; }
  const char* what() const noexcept override { return failure_.message.c_str(); }

private:
  Failure failure_;
};

// Describes an errno, or one of cuFile's codes, which are all above 5000.
std::string error_text(int error);

// A failed system call: "read of 4096 bytes at offset 512: Input/output error".
Failure system_failure(int error, const std::string& operation, const std::string& path = {});
Failure transfer_failure(int error, Op op, std::uint64_t bytes, std::uint64_t offset, const std::string& path);
Failure end_of_file(std::uint64_t bytes, std::uint64_t offset, std::uint64_t size, const std::string& path);
Failure bad_argument(std::string message);
Failure unavailable(std::string message);
Failure no_queue(int error, const std::string& operation);  // ENOMEM becomes Failure::Kind::Memory
Failure out_of_memory() noexcept;                           // allocates nothing

// Converts the exception being handled.
Failure current_failure() noexcept;

[[noreturn]] inline void raise(Failure failure) {
  throw IoError(std::move(failure));
}

[[noreturn]] void broken_invariant(const char* condition, const char* file, int line);

}  // namespace nvme_ops

// Checks for our own bugs, never for the caller's mistakes. Stays active with NDEBUG.
#define NVME_INVARIANT(condition) \
  ((condition) ? static_cast<void>(0) : ::nvme_ops::broken_invariant(#condition, __FILE__, __LINE__))
