#include "base/error.h"

#include <errno.h>

#include <cstring>
#include <new>
#include <system_error>

namespace nvme_ops {

namespace {

// Codes that a transfer can meet, and what to do about them.
const char* cufile_text(int code) {
  switch (code) {
    case 5001:
      return "the nvidia-fs driver is not loaded and compatibility mode is off";
    case 5006:
      return "the driver is being closed";
    case 5007:
      return "not supported on this platform";
    case 5008:
      return "not supported on this file";
    case 5009:
      return "not supported on this GPU";
    case 5011:
      return "the CUDA driver failed";
    case 5012:
      return "not a device pointer";
    case 5013:
      return "a kind of memory that is not supported";
    case 5014:
      return "the range leaves its allocation";
    case 5015:
      return "another CUDA context";
    case 5016:
      return "more memory than may be pinned (max_device_pinned_mem_size_kb in cufile.json)";
    case 5017:
      return "the range leaves its registration";
    case 5018:
      return "a kind of file that is not supported";
    case 5020:
      return "the file is not open with O_DIRECT";
    case 5022:
      return "a wrong argument";
    case 5023:
      return "the memory is registered already";
    case 5024:
      return "the memory is not registered";
    case 5025:
      return "permission denied";
    case 5027:
      return "the file could not be registered; some file systems need CUFILE_EXPERIMENTAL_FS=1";
    case 5028:
      return "the file is registered already";
    case 5029:
      return "no GPU found";
    case 5030:
      return "an internal error; in containers without /run/udev set CUFILE_EXPERIMENTAL_FS=1";
    case 5031:
      return "no further descriptor could be had for the file, or it has no name any more";
    case 5033:
      return "the driver could not be initialised: no CUDA driver, or no GPU";
    case 5034:
      return "switched off for this file in cufile.json";
    case 5036:
      return "GPU memory could not be pinned";
    case 5044:
      return "an I/O error";
    default:
      return "see CUfileOpError in cuFile's reference";
  }
}

}  // namespace

std::string error_text(int error) {
  if (error > 5000) return "cuFile error " + std::to_string(error) + ", " + cufile_text(error);
  char text[128];
  return strerror_r(error, text, sizeof text);
}

Failure system_failure(int error, const std::string& operation, const std::string& path) {
  return {Failure::Kind::System, error, operation + ": " + error_text(error), path};
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

Failure no_queue(int error, const std::string& operation) {
  Failure failure = system_failure(error, operation);
  if (error == ENOMEM) failure.kind = Failure::Kind::Memory;
  return failure;
}

Failure out_of_memory() noexcept {
  return {Failure::Kind::Memory, 0, "out of memory", {}};  // short enough for the string's own buffer
}

Failure current_failure() noexcept {
  try {
    try {
      throw;
    } catch (const IoError& error) {
      return error.failure();
    } catch (const std::bad_alloc&) {
      return out_of_memory();
    } catch (const std::system_error& error) {  // std::thread
      return system_failure(error.code().value(), "starting a thread");
    } catch (const std::exception& error) {
      return {Failure::Kind::Internal, 0, error.what(), {}};
    }
  } catch (...) {  // no memory left for the message
    return out_of_memory();
  }
}

void broken_invariant(const char* condition, const char* file, int line) {
  raise({Failure::Kind::Internal,
         0,
         std::string("nvme_ops bug: ") + condition + " is false at " + file + ":" + std::to_string(line),
         {}});
}

}  // namespace nvme_ops
