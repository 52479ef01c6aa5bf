// All backends, in order of preference, and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "backends/backend.h"

namespace nvme_ops {

extern const Backend kIoUring;
extern const Backend kLibaio;
extern const Backend kThreads;

const std::vector<const Backend*>& backends();

// Returns the result of the backend's probe, which runs once per process.
const Probe& probe(const Backend& backend);

// Returns the backends to try, best first: the one named, or all usable ones for "auto". NVME_OPS_BACKEND stands in for
// an empty name. Throws IoError.
std::vector<const Backend*> choose_backends(const std::string& name);

}  // namespace nvme_ops
