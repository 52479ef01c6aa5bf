// cuFile's driver: opened once per process, when a handle first needs it, and closed at exit.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "backends/backend.h"

namespace nvme_ops {

// The few functions of NVIDIA's cuFile that are used here, found at run time. They are declared again because cufile.h
// needs CUDA's headers and may not be redistributed; names and layouts are those of cuFile 1.0 to 1.20.
struct CuFileApi {
  struct Status {  // CUfileError_t
    int code;      // 0, or more than 5000
    int cuda;      // CUresult, where `code` says that CUDA failed
  };
  struct Description {  // CUfileDescr_t
    int type;           // kDescriptor
    union {
      int fd;
      void* other;
    } file;
    const void* operations;
  };
  static constexpr int kDescriptor = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD

  Status (*driver_open)();
  Status (*driver_close)();
  Status (*driver_properties)(void* properties);
  Status (*register_file)(void** file, Description* description);
  void (*deregister_file)(void* file);
  Status (*register_memory)(const void* memory, std::size_t bytes, int flags);
  Status (*deregister_memory)(const void* memory);
  ssize_t (*read)(void* file, void* memory, std::size_t bytes, off_t file_offset, off_t memory_offset);
  ssize_t (*write)(void* file, const void* memory, std::size_t bytes, off_t file_offset, off_t memory_offset);

  // Null where the library is too old for them.
  Status (*version)(int* version);                          // 1000 * major + 10 * minor
  Status (*set_flag_parameter)(int parameter, bool value);  // before driver_open only

  std::string path;  // of the library
  bool fake;         // a test double, recognised by a symbol of its own
};

// Returns the library already loaded, else the first of `candidates` (absolute, best first) that loads. Throws IoError.
CuFileApi load_cufile(const std::vector<std::string>& candidates);

class CuFileDriver {
public:
  // Throws an IoError, the same one every time, if cuFile cannot work here. `candidates`: see load_cufile.
  static CuFileDriver& open(const std::vector<std::string>& candidates);

  // Returns the open driver, or null; always null in a forked child, as neither cuFile nor CUDA survives a fork.
  static CuFileDriver* current();

  // Called at exit, when nothing uses the driver any more.
  static void close();

  const CuFileApi& api() const { return api_; }  // also for what cannot fail
  int version() const { return version_; }       // 1000 * major + 10 * minor, 0 where unknown

  // Why data cannot go between storage and GPU without passing host memory, with the fix; empty if they can.
  const std::string& why_not_direct() const { return why_not_direct_; }

  // Returns cuFile's handle of the file. Throws an IoError with cuFile's code.
  void* register_file(int fd, const std::string& path) const;

  void register_memory(const void* memory, std::size_t bytes) const;  // throws IoError

private:
  explicit CuFileDriver(CuFileApi api);
  int open_driver(std::chrono::steady_clock::time_point deadline) const;
  void read_properties();

  const CuFileApi api_;
  int version_ = 0;
  std::string why_not_direct_;
};

// Requests on GPU memory, through cuFile. Not listed among the backends to choose from: it serves device memory only.
// Needs the driver to be open, and Request::file to be what CuFileDriver::register_file returned.
extern const Backend kCuFile;

}  // namespace nvme_ops
