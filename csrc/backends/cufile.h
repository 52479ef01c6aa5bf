// Requests on GPU memory, through cuFile. Not listed among the backends to choose from: it serves device memory only.
#pragma once

#include "backends/backend.h"

namespace nvme_ops {

// Needs the driver to be open, and Request::file to be what CuFileDriver::register_file returned.
extern const Backend kCuFile;

}  // namespace nvme_ops
