// cuFile's driver: opened once per process, when a handle first needs it, and closed at exit.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "backends/cufile_api.h"

namespace nvme_ops {

class CuFileDriver {
public:
  // Throws an IoError, the same one every time, if cuFile cannot work here. `candidates`: see load_cufile.
  static CuFileDriver& open(const std::vector<std::string>& candidates);

  // Returns the open driver, or null; always null in a forked child, as neither cuFile nor CUDA survives a fork.
  static CuFileDriver* current();

  // Called at exit, when nothing uses the driver any more.
  static void close();

  const CuFileApi& api() const { return api_; }
  int version() const { return version_; }  // 1000 * major + 10 * minor, 0 where unknown

  // Why data cannot go between storage and GPU without passing host memory, with the fix; empty if they can.
  const std::string& why_not_direct() const { return why_not_direct_; }

  // Returns cuFile's handle of the file. Throws an IoError with cuFile's code.
  void* register_file(int fd, const std::string& path) const;
  void deregister_file(void* file) const;

  void register_memory(const void* memory, std::size_t bytes) const;  // throws IoError
  void deregister_memory(const void* memory) const;

private:
  explicit CuFileDriver(CuFileApi api);
  int open_driver(std::chrono::steady_clock::time_point deadline) const;
  void read_properties();

  const CuFileApi api_;
  int version_ = 0;
  std::string why_not_direct_;
};

}  // namespace nvme_ops
