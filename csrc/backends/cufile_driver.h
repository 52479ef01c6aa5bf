// cuFile's driver: opened once in a process, when a handle first needs it, and closed at exit.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "backends/cufile_api.h"

namespace nvme_ops {

class CuFileDriver {
public:
  // Throws IoError when cuFile cannot work here: the same one every time. `candidates`: see load_cufile.
  static CuFileDriver& open(const std::vector<std::string>& candidates);

  // The open driver, or null. Null in a forked child too: neither cuFile nor CUDA survives a fork.
  static CuFileDriver* current();

  // At exit, when nothing uses it any more.
  static void close();

  const CuFileApi& api() const { return api_; }
  int version() const { return version_; }  // 1000 * major + 10 * minor, 0 where unknown

  // Empty when data can go between storage and GPU without passing host memory; else why not, with the fix.
  const std::string& why_not_direct() const { return why_not_direct_; }

  // What cuFile knows the file as. Throws IoError with cuFile's code.
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
