// The gds op's choice of path: cuFile where it goes straight to the GPU, else its compatibility mode or our own path.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "backends/cufile_driver.h"
#include "base/error.h"
#include "base/limits.h"
#include "binding/device_path.h"
#include "binding/gds_pins.h"

namespace nvme_ops {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::uint64_t kPage = kPageSize;    // below this cuFile leaves the direct path
constexpr std::uint64_t kTelling = 16 << 20;  // bytes from which on a transfer's rate counts
constexpr unsigned kTryAgain = 64;            // such transfers after which the slower path is tried again
constexpr double kNewWeight = 0.25;           // of the latest rate in the average

enum class Mode : std::uint8_t { Auto, Require, Off };
enum class Path : std::uint8_t { Bounce, Compatible, Direct };
constexpr const char* kNames[] = {"bounce", "compat", "gds"};

Mode mode_of_environment() {
  const char* const value = std::getenv("NVME_OPS_GDS");
  const std::string mode = value != nullptr && *value != '\0' ? value : "auto";
  if (mode == "auto") return Mode::Auto;
  if (mode == "require") return Mode::Require;
  if (mode == "off") return Mode::Off;
  raise(bad_argument("NVME_OPS_GDS='" + mode + "' is not one of auto, require, off"));
}

// Two paths and their measured rates.
class Contest {
public:
  Path choose(std::uint64_t bytes) {
    if (bytes < kTelling) return faster();
    if (rates_[0] == 0) return Path::Bounce;
    if (rates_[1] == 0) return Path::Compatible;
    return ++since_ % kTryAgain == 0 ? slower() : faster();
  }

  void note(Path path, std::uint64_t bytes, double seconds) {
    if (bytes < kTelling || seconds <= 0) return;
    double& rate = rates_[path == Path::Bounce ? 0 : 1];
    const double now = static_cast<double>(bytes) / seconds;
    rate = rate == 0 ? now : (1 - kNewWeight) * rate + kNewWeight * now;
  }

  std::string words() const {
    if (rates_[0] == 0 || rates_[1] == 0) return "not measured yet";
    return "bounce " + gigabytes(rates_[0]) + ", compat " + gigabytes(rates_[1]);
  }

private:
  static std::string gigabytes(double rate) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f GB/s", rate / 1e9);
    return text;
  }
  Path faster() const { return rates_[1] > rates_[0] ? Path::Compatible : Path::Bounce; }
  Path slower() const { return faster() == Path::Bounce ? Path::Compatible : Path::Bounce; }

  std::array<double, 2> rates_{};
  unsigned since_ = 0;
};

class GdsPath final : public DevicePath {
public:
  explicit GdsPath(EngineOptions options) : options_(std::move(options)), mode_(mode_of_environment()) {
    options_.backends = {&kCuFile};
    options_.queue_depth = 1;  // cuFile's calls block: one per lane
  }

  void transfer(const DeviceTransfer& transfer) override {
    const auto& [engine, op, priority, tool, extents, interrupted] = transfer;
    std::vector<DeviceExtent> bounced;
    std::uint64_t bounced_bytes = 0;
    std::optional<FileHold> hold;
    const SharedFile* held = nullptr;
    for (const DeviceExtent& extent : extents) {
      // Partial pages are left to the page cache.
      const std::uint64_t end = extent.offset + extent.bytes;
      const std::uint64_t head = std::min(extent.bytes, (kPage - extent.offset % kPage) % kPage);
      const std::uint64_t tail = std::min(extent.bytes - head, end % kPage);
      const std::uint64_t body = extent.bytes - head - tail;
      if (extent.file.get() != held) {
        if (hold) hold->end_after(op);
        hold.emplace(extent.file);
        held = extent.file.get();
      }
      bool prepared = false;
      extent.file->prepare(&prepared, op, extent.offset, extent.bytes, extent.whole);
      std::string why = "less than a page";
      const Path path = body == 0 ? Path::Bounce : choose(op, tool, extent, head, body, &why);
      if (path == Path::Bounce) {
        bounced.push_back(extent);
        bounced_bytes += extent.bytes;
      } else {
        const auto start = std::chrono::steady_clock::now();
        through_cufile(op, tool, extent, head, body, interrupted);
        note(op, path, extent.bytes, start);
        const auto edge = [&](std::uint64_t position, std::uint64_t bytes) {
          DeviceExtent part = extent;
          part.position = position, part.offset = extent.offset + position, part.bytes = bytes;
          part.whole = false, part.prepared = true;
          if (bytes > 0) bounced.push_back(part);
        };
        edge(0, head);
        edge(head + body, tail);
      }
      account(kNames[static_cast<std::size_t>(path)], why, extent.bytes);
    }
    if (hold) hold->end_after(op);
    const auto start = std::chrono::steady_clock::now();
    bounce({engine, op, priority, tool, bounced, interrupted});
    if (bounced_bytes > 0) note(op, Path::Bounce, bounced_bytes, start);
  }

private:
  void note(Op op, Path path, std::uint64_t bytes, std::chrono::steady_clock::time_point start) {
    const Seconds took = std::chrono::steady_clock::now() - start;
    const std::lock_guard<std::mutex> lock(mutex_);
    contests_[op == Op::Read ? 0 : 1].note(path, bytes, took.count());
  }

  Path choose(Op op, const Tool& tool, const DeviceExtent& extent, std::uint64_t position, std::uint64_t bytes,
              std::string* why) {
    if (mode_ == Mode::Off) {
      *why = "NVME_OPS_GDS=off";
      return Path::Bounce;
    }
    const CuFileDriver* const driver = CuFileDriver::current();
    if (driver == nullptr) return fall_back("cuFile's driver is not open", why);
    if (Pins::instance().pinned(data_of(*extent.tensor) + position, bytes) == Pins::Part::Some) {
      return fall_back("only part of the tensor is pinned", why);
    }
    if (tool.bounce && mode_ == Mode::Auto) {
      *why = "experience";
      return Path::Bounce;
    }
    const bool direct = driver->why_not_direct().empty();
    if (!direct && mode_ == Mode::Require) return fall_back(driver->why_not_direct(), why);
    *why = "cuFile can reach the GPU directly";
    if (!direct) {
      const std::lock_guard<std::mutex> lock(mutex_);
      Contest& contest = contests_[op == Op::Read ? 0 : 1];
      *why = driver->why_not_direct() + "; " + contest.words();
      if (contest.choose(bytes) == Path::Bounce) return Path::Bounce;
    }
    const std::string refused = refusal(*driver, extent);
    if (!refused.empty()) return fall_back(refused, why);
    return direct ? Path::Direct : Path::Compatible;
  }

  Path fall_back(const std::string& reason, std::string* why) const {
    if (mode_ == Mode::Require) raise(unavailable("NVME_OPS_GDS=require, but " + reason));
    *why = reason;
    return Path::Bounce;
  }

  // Returns why cuFile does not accept this file, or registers it.
  static std::string refusal(const CuFileDriver& driver, const DeviceExtent& extent) {
    File& file = extent.file->file();
    if (file.registration() != nullptr) return {};
    if (!file.direct_possible()) return "the file system has no direct I/O, or the handle's cache mode is 'buffered'";
    try {
      file.attach(driver.register_file(file.direct(), file.path()),
                  [&driver](void* registration) { driver.api().deregister_file(registration); });
    } catch (const IoError& error) {
      return error.failure().message + ": '" + error.failure().path + "'";
    }
    return {};
  }

  void through_cufile(Op op, const Tool& tool, const DeviceExtent& extent, std::uint64_t position, std::uint64_t bytes,
                      const Interrupted& interrupted) {
    synchronize(*extent.tensor);
    Extent part{extent.file, data_of(*extent.tensor) + position, bytes, extent.offset + position, true};
    part.prepared = part.device = true;
    const Pins::Use use(part.memory, bytes);
    const auto job = std::make_shared<Job>(op, std::vector<Extent>{part}, Priority::Demand, tool);
    cufile().submit(job);
    wait(*job, interrupted);
    job->outcome()->raise_failure();
  }

  Engine& cufile() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!cufile_) cufile_ = std::make_unique<Engine>(options_);
    return *cufile_;
  }

  EngineOptions options_;
  const Mode mode_;
  std::mutex mutex_;
  std::array<Contest, 2> contests_;  // reads, writes
  std::unique_ptr<Engine> cufile_;
};

}  // namespace

std::shared_ptr<DevicePath> make_device_path(const EngineOptions& options) {
  return std::make_shared<GdsPath>(options);
}

}  // namespace nvme_ops
