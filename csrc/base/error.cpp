#include "base/error.h"

#include <cstring>

namespace nvme_ops {

Failure system_failure(int error, const std::string& operation, const std::string& path) {
  char text[128];
  return {Failure::Kind::System, error, operation + ": " + strerror_r(error, text, sizeof text), path};
}

Failure transfer_failure(int error, Op op, std::uint64_t bytes, std::uint64_t offset, const std::string& path) {
  return system_failure(
      error, std::string(name_of(op)) + " of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset),
      path);
}

Failure end_of_file(std::uint64_t bytes, std::uint64_t offset, std::uint64_t size, const std::string& path) {
  return {Failure::Kind::EndOfFile, 0,
          "read of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
              " passes the end of the file, which has " + std::to_string(size) + " bytes: '" + path + "'",
          path};
}

Failure bad_argument(std::string message) {
  return {Failure::Kind::Argument, 0, std::move(message), {}};
}

void broken_invariant(const char* condition, const char* file, int line) {
  raise({Failure::Kind::Internal,
         0,
         std::string("nvme_ops bug: ") + condition + " is false at " + file + ":" + std::to_string(line),
         {}});
}

}  // namespace nvme_ops
