#include "base/error.h"

#include <errno.h>

#include <cstring>
#include <new>
#include <system_error>

namespace nvme_ops {

namespace {

// Codes that a transfer can meet, and what to do about them.
constexpr std::pair<int, const char*> kCuFileTexts[] = {
    {5001, "the nvidia-fs driver is not loaded and compatibility mode is off"},
    {5006, "the driver is being closed"},
    {5007, "not supported on this platform"},
    {5008, "not supported on this file"},
    {5009, "not supported on this GPU"},
    {5011, "the CUDA driver failed"},
    {5012, "not a device pointer"},
    {5013, "a kind of memory that is not supported"},
    {5014, "the range leaves its allocation"},
    {5015, "another CUDA context"},
    {5016, "more memory than may be pinned (max_device_pinned_mem_size_kb in cufile.json)"},
    {5017, "the range leaves its registration"},
    {5018, "a kind of file that is not supported"},
    {5020, "the file is not open with O_DIRECT"},
    {5022, "a wrong argument"},
    {5023, "the memory is registered already"},
    {5024, "the memory is not registered"},
    {5025, "permission denied"},
    {5027, "the file could not be registered; some file systems need CUFILE_EXPERIMENTAL_FS=1"},
    {5028, "the file is registered already"},
    {5029, "no GPU found"},
    {5030, "an internal error; in containers without /run/udev set CUFILE_EXPERIMENTAL_FS=1"},
    {5031, "no descriptor was available for the file, or it no longer has a name"},
    {5033, "the driver could not be initialised: no CUDA driver, or no GPU"},
    {5034, "switched off for this file in cufile.json"},
    {5036, "GPU memory could not be pinned"},
    {5044, "an I/O error"},
};

const char* cufile_text(int code) {
  for (const auto& [known, text] : kCuFileTexts) {
    if (known == code) return text;
  }
  return "see CUfileOpError in cuFile's reference";
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

Failure unavailable(std::string message) {
  return {Failure::Kind::Unavailable, 0, std::move(message), {}};
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
