#include "backends/cufile_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "base/fork.h"
#include "base/symbol.h"
#include "base/thread.h"

namespace nvme_ops {
namespace {

constexpr const char* kLibrary = "libcufile.so.0";  // no package provides an unversioned one
constexpr const char* kOverride = "NVME_OPS_CUFILE_LIBRARY";

Failure not_usable(const std::string& reason) {
  return unavailable("cuFile is not usable: " + reason);
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

using Clock = std::chrono::steady_clock;

// Opening takes a second, nine if sixteen processes open it at once (docs/gpu-results.md), or never ends.
constexpr std::chrono::seconds kOpeningPatience(20);
constexpr std::chrono::seconds kTestPatience(3);  // with the tests' libcufile
constexpr std::chrono::seconds kClosingPatience(4);
constexpr int kAllowCompatible = 1;  // CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE
constexpr int kNoNvidiaFs = 5001;    // CU_FILE_DRIVER_NOT_INITIALIZED
constexpr const char* kNvidiaFsFix = " (fix: apt-get install nvidia-gds && modprobe nvidia-fs)";
constexpr unsigned kPeerToPeer = 4;  // CU_FILE_P2P_SUPPORTED

// The start of CUfileDrvProps_t, which grows with every version.
struct Properties {
  unsigned nvidia_fs_major, nvidia_fs_minor;
  std::size_t poll_threshold, largest_direct;
  unsigned status_flags, control_flags;
  unsigned features;
  unsigned char rest[4096];
};

struct State {
  std::mutex mutex;
  std::unique_ptr<CuFileDriver> driver;
  std::optional<Failure> failure;
  std::atomic<unsigned long> generation{0};  // read without the lock, which may be held forever after a fork
  std::atomic<bool> used{false};
};

State& state() {
  static auto* const only = new State;  // outlives every user
  return *only;
}

std::chrono::seconds opening_patience(const CuFileApi& api) {
  return api.fake ? kTestPatience : kOpeningPatience;
}

Failure cannot_work(const std::string& reason) {
  return unavailable("cuFile cannot work here: " + reason + " (NVME_OPS_GDS=off moves GPU tensors without cuFile)");
}

// Runs something that may never return. If so, its thread is lost, and so is cuFile for this process.
bool returns_in_time(std::function<void()> work, Clock::time_point deadline) {
  std::packaged_task<void()> task(std::move(work));
  const std::future<void> ended = task.get_future();
  std::thread thread = quiet_thread(std::move(task));
  const bool done = ended.wait_until(deadline) == std::future_status::ready;
  done ? thread.join() : thread.detach();
  return done;
}

// Sends the log to /dev/null while cuFile is opened, which would write cufile.log to the current folder, unless the
// user has chosen a file. cuFile's parameter for this has no effect in 1.20.
class NoLogFile {
public:
  NoLogFile() {
    const char* const chosen = std::getenv(kVariable);
    ours_ = (chosen == nullptr || *chosen == '\0') && std::getenv("CUFILE_ENV_PATH_JSON") == nullptr;
    if (ours_) ::setenv(kVariable, "/dev/null", 1);
  }
  NoLogFile(const NoLogFile&) = delete;
  NoLogFile& operator=(const NoLogFile&) = delete;
  ~NoLogFile() {
    if (ours_) ::unsetenv(kVariable);
  }

private:
  static constexpr const char* kVariable = "CUFILE_LOGFILE_PATH";
  bool ours_;
};

}  // namespace

CuFileApi load_cufile(const std::vector<std::string>& candidates) {
  void* const library = open_library(candidates);
  CuFileApi api{};
  std::string missing;
  const auto need = [&](const char* name, auto* function) {
    if (!find_symbol(library, name, function)) missing += std::string(missing.empty() ? "" : ", ") + name;
  };
  need("cuFileDriverOpen", &api.driver_open);
  need("cuFileDriverGetProperties", &api.driver_properties);
  need("cuFileHandleRegister", &api.register_file);
  need("cuFileHandleDeregister", &api.deregister_file);
  need("cuFileBufRegister", &api.register_memory);
  need("cuFileBufDeregister", &api.deregister_memory);
  need("cuFileRead", &api.read);
  need("cuFileWrite", &api.write);
  if (!find_symbol(library, "cuFileDriverClose_v2", &api.driver_close)) need("cuFileDriverClose", &api.driver_close);
  find_symbol(library, "cuFileGetVersion", &api.version);
  find_symbol(library, "cuFileSetParameterBool", &api.set_flag_parameter);
  api.fake = ::dlsym(library, "nvme_ops_fake_cufile") != nullptr;
  Dl_info where{};
  if (api.driver_open != nullptr && ::dladdr(reinterpret_cast<void*>(api.driver_open), &where) != 0) {
    api.path = where.dli_fname;
  }
  if (!missing.empty()) raise(not_usable(api.path + " lacks " + missing));
  return api;
}

CuFileDriver::CuFileDriver(CuFileApi api) : api_(std::move(api)) {
  // Without it cuFileDriverOpen reads an empty list of modules for ever.
  if (!api_.fake && ::access("/proc/modules", F_OK) != 0) {
    raise(cannot_work("/proc/modules is missing, and cuFile would wait for it for ever; fix: a kernel with modules"));
  }
  const NoLogFile no_log_file;
  // In compatibility mode cuFile goes through host memory without saying so; else it refuses, and our path serves.
  const bool strict = api_.set_flag_parameter != nullptr && api_.set_flag_parameter(kAllowCompatible, false).code == 0;
  const Clock::time_point deadline = Clock::now() + opening_patience(api_);
  int code = open_driver(deadline);
  if (code != 0 && strict) {
    why_not_direct_ = "cuFile opens in compatibility mode only: " + error_text(code);
    if (code == kNoNvidiaFs) why_not_direct_ += kNvidiaFsFix;
    api_.set_flag_parameter(kAllowCompatible, true);
    code = open_driver(deadline);
  }
  if (code != 0) raise(cannot_work("cuFileDriverOpen: " + error_text(code)));
  if (api_.version != nullptr) api_.version(&version_);
  if (!strict) read_properties();
}

int CuFileDriver::open_driver(Clock::time_point deadline) const {
  const auto status = std::make_shared<CuFileApi::Status>();
  if (!returns_in_time([status, driver_open = api_.driver_open] { *status = driver_open(); }, deadline)) {
    raise(cannot_work("cuFileDriverOpen of " + api_.path + " has not returned after " +
                      std::to_string(opening_patience(api_).count()) + " s"));
  }
  return status->code;
}

void CuFileDriver::read_properties() {
  Properties properties{};
  const CuFileApi::Status status = api_.driver_properties(&properties);
  if (status.code != 0) {
    why_not_direct_ = "cuFile does not tell its properties: " + error_text(status.code);
  } else if (properties.nvidia_fs_major == 0 && (properties.features >> kPeerToPeer & 1U) == 0) {
    why_not_direct_ = std::string("nvidia-fs is not loaded and PCI peer-to-peer is not available") + kNvidiaFsFix;
  }
}

CuFileDriver& CuFileDriver::open(const std::vector<std::string>& candidates) {
  State& now = state();
  if (now.used && now.generation != fork_generation()) {
    raise(cannot_work("this process was forked after cuFile was used; fix: start processes with spawn"));
  }
  const std::lock_guard<std::mutex> lock(now.mutex);
  if (now.driver) return *now.driver;
  if (now.failure) raise(*now.failure);
  now.generation = fork_generation();
  now.used = true;
  try {
    now.driver.reset(new CuFileDriver(load_cufile(candidates)));
  } catch (const IoError& error) {
    now.failure = error.failure();
    throw;
  }
  return *now.driver;
}

CuFileDriver* CuFileDriver::current() {
  State& now = state();
  if (!now.used || now.generation != fork_generation()) return nullptr;
  const std::lock_guard<std::mutex> lock(now.mutex);
  return now.driver.get();
}

void CuFileDriver::close() {
  CuFileDriver* const driver = current();
  if (driver == nullptr) return;
  static_cast<void>(returns_in_time([close = driver->api_.driver_close] { close(); }, Clock::now() + kClosingPatience));
  State& now = state();
  const std::lock_guard<std::mutex> lock(now.mutex);
  static_cast<void>(now.driver.release());  // leaked: somebody may still hold a reference
  now.failure = cannot_work("its driver has been closed");
}

void* CuFileDriver::register_file(int fd, const std::string& path) const {
  CuFileApi::Description description{};
  description.type = CuFileApi::kDescriptor;
  description.file.fd = fd;
  void* file = nullptr;
  const CuFileApi::Status status = api_.register_file(&file, &description);
  if (status.code != 0) raise(system_failure(status.code, "registering the file with cuFile", path));
  return file;
}

void CuFileDriver::register_memory(const void* memory, std::size_t bytes) const {
  const CuFileApi::Status status = api_.register_memory(memory, bytes, 0);
  if (status.code != 0) {
    raise(system_failure(status.code, "registering " + std::to_string(bytes) + " bytes of memory with cuFile"));
  }
}

}  // namespace nvme_ops
