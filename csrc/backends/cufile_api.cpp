#include "backends/cufile_api.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/error.h"

namespace nvme_ops {
namespace {

constexpr const char* kLibrary = "libcufile.so.0";  // no package brings an unversioned one
constexpr const char* kOverride = "NVME_OPS_CUFILE_LIBRARY";

Failure not_usable(const std::string& reason) {
  return {Failure::Kind::Unavailable, 0, "cuFile is not usable: " + reason, {}};
}

const char* loading_error() {
  const char* const text = ::dlerror();
  return text != nullptr ? text : "unknown error";
}

// Never loads a second copy of the library: it has state for the whole process.
void* open_library(const std::vector<std::string>& candidates) {
  const char* const named = std::getenv(kOverride);
  if (named != nullptr && *named != '\0') {
    if (*named != '/') raise(not_usable(std::string(kOverride) + "='" + named + "' is not an absolute path"));
    if (void* const library = ::dlopen(named, RTLD_NOW | RTLD_LOCAL)) return library;
    raise(not_usable(std::string(kOverride) + ": " + loading_error()));
  }
  if (void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  std::string tried;
  for (const std::string& path : candidates) {
    if (void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += std::string("; ") + loading_error();
  }
  if (void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) return library;
  raise(not_usable(std::string(loading_error()) + tried +
                   "; fix: pip install nvidia-cufile (for CUDA 12: nvidia-cufile-cu12)"));
}

template <class Function>
bool find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

CuFileApi load_cufile(const std::vector<std::string>& candidates) {
  void* const library = open_library(candidates);
  CuFileApi api{};
  std::string missing;
  const auto need = [&](const char* name, auto* function) {
    if (!find(library, name, function)) missing += std::string(missing.empty() ? "" : ", ") + name;
  };
  need("cuFileDriverOpen", &api.driver_open);
  need("cuFileDriverGetProperties", &api.driver_properties);
  need("cuFileHandleRegister", &api.register_file);
  need("cuFileHandleDeregister", &api.deregister_file);
  need("cuFileBufRegister", &api.register_memory);
  need("cuFileBufDeregister", &api.deregister_memory);
  need("cuFileRead", &api.read);
  need("cuFileWrite", &api.write);
  if (!find(library, "cuFileDriverClose_v2", &api.driver_close)) need("cuFileDriverClose", &api.driver_close);
  find(library, "cuFileGetVersion", &api.version);
  find(library, "cuFileSetParameterBool", &api.set_flag_parameter);
  api.fake = ::dlsym(library, "nvme_ops_fake_cufile") != nullptr;
  Dl_info where{};
  if (api.driver_open != nullptr && ::dladdr(reinterpret_cast<void*>(api.driver_open), &where) != 0) {
    api.path = where.dli_fname;
  }
  if (!missing.empty()) raise(not_usable(api.path + " lacks " + missing));
  return api;
}

}  // namespace nvme_ops
