// One request as a plain system call.
#pragma once

#include <errno.h>
#include <unistd.h>

#include "base/io.h"

namespace nvme_ops {

// Returns the bytes moved, or a negated errno.
inline std::int64_t transfer(const Request& request) {
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = request.op == Op::Read ? ::pread(request.fd, request.data, request.bytes, offset)
                                               : ::pwrite(request.fd, request.data, request.bytes, offset);
  return moved < 0 ? -errno : moved;
}

}  // namespace nvme_ops
