#include "backends/registry.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include "base/error.h"

namespace nvme_ops {

const std::vector<const Backend*>& backends() {
  static const std::vector<const Backend*> all{&kIoUring, &kLibaio, &kThreads};
  return all;
}

const Probe& probe(const Backend& backend) {
  static std::mutex mutex;
  static std::map<const Backend*, Probe> answers;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = answers.find(&backend);
  if (found == answers.end()) found = answers.emplace(&backend, backend.probe()).first;
  return found->second;
}

std::vector<const Backend*> choose_backends(const std::string& name) {
  std::string wanted = name;
  std::string source = "backend";
  if (wanted.empty()) {
    const char* environment = std::getenv("NVME_OPS_BACKEND");
    wanted = environment != nullptr && *environment != '\0' ? environment : "auto";
    source = "NVME_OPS_BACKEND";
  }
  std::vector<const Backend*> chosen;
  std::string names = "auto";
  for (const Backend* backend : backends()) {
    names += std::string(", ") + backend->name;
    if (wanted == "auto" ? probe(*backend).usable : wanted == backend->name) chosen.push_back(backend);
  }
  if (chosen.empty()) raise(bad_argument(source + "='" + wanted + "' is not one of " + names));
  if (wanted != "auto" && !probe(*chosen.front()).usable) {
    raise(unavailable("the " + wanted + " backend is not usable: " + probe(*chosen.front()).reason));
  }
  return chosen;
}

}  // namespace nvme_ops
