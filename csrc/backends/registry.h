// The backends there are, in order of preference, and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "backends/backend.h"

namespace nvme_ops {

extern const Backend kIoUring;
extern const Backend kLibaio;
extern const Backend kThreads;

const std::vector<const Backend*>& backends();

// The answer of the backend's probe, asked once per process.
const Probe& probe(const Backend& backend);

// The backends to try, best first: one for a name, all usable ones for "auto" or "". Throws IoError for a name that is
// unknown or not usable. NVME_OPS_BACKEND stands in for an empty name.
std::vector<const Backend*> choose_backends(const std::string& name);

}  // namespace nvme_ops
