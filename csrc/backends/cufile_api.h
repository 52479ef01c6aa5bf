// The few functions of NVIDIA's cuFile that are used here, found at run time. They are declared again because cufile.h
// needs CUDA's headers and may not be redistributed; names and layouts are those of cuFile 1.0 to 1.20.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <vector>

namespace nvme_ops {

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

// Returns the library already loaded, else the first of `candidates` (absolute paths, best first) that loads. Throws an
// IoError that says what was tried and how to get it.
CuFileApi load_cufile(const std::vector<std::string>& candidates);

}  // namespace nvme_ops
