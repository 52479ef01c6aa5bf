// Which path a tensor on an accelerator takes to its file. Each op has its own choice.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "binding/device_tensor.h"
#include "engine/engine.h"

namespace nvme_ops {

class DevicePath {
public:
  virtual ~DevicePath() = default;

  // Moves all extents of one call. Throws IoError.
  virtual void transfer(const DeviceTransfer& transfer) = 0;

  struct Use {
    std::uint64_t transfers = 0, bytes = 0;
  };
  struct Statistics {
    std::string last;  // the path of the last transfer; empty before the first
    std::string why;   // it was chosen
    std::map<std::string, Use> uses;
  };
  Statistics statistics() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return statistics_;
  }

protected:
  void account(const std::string& path, const std::string& why, std::uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_.last = path;
    statistics_.why = why;
    Use& use = statistics_.uses[path];
    ++use.transfers;
    use.bytes += bytes;
  }

private:
  mutable std::mutex mutex_;
  Statistics statistics_;
};

// Makes the device path of a handle with these options; every op defines it.
std::shared_ptr<DevicePath> make_device_path(const EngineOptions& options);

}  // namespace nvme_ops
