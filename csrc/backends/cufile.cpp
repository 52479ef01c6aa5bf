#include "backends/cufile.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "backends/cuda_context.h"
#include "backends/cufile_driver.h"
#include "base/error.h"

namespace nvme_ops {
namespace {

// cuFile's calls block, so a queue has one request at a time: there are as many in flight as lanes.
class CuFileQueue final : public Queue {
public:
  explicit CuFileQueue(const CuFileDriver& driver) : driver_(driver) {}

  std::size_t submit(const Request* requests, std::size_t count) override {
    if (answered_ || count == 0) return 0;
    answer_ = {requests->token, transfer(*requests)};
    answered_ = true;
    return 1;
  }

  std::size_t reap(Completion* completions, std::size_t most, std::size_t, std::chrono::milliseconds) override {
    if (most == 0 || !std::exchange(answered_, false)) return 0;
    *completions = answer_;
    return 1;
  }

  bool may_be_passed_by() const override { return false; }

private:
  std::int64_t transfer(const Request& request) const {
    const CudaContextOf context(request.data);
    const auto offset = static_cast<off_t>(request.offset);
    const CuFileApi& api = driver_.api();
    errno = 0;
    const ssize_t moved = request.op == Op::Read ? api.read(request.file, request.data, request.bytes, offset, 0)
                                                 : api.write(request.file, request.data, request.bytes, offset, 0);
    if (moved >= 0) return moved;
    return moved == -1 ? -(errno != 0 ? errno : EIO) : moved;  // -1: errno; below: cuFile's own code, negated
  }

  const CuFileDriver& driver_;
  Completion answer_{};
  bool answered_ = false;
};

std::unique_ptr<Queue> open_queue(const QueueOptions&) {
  const CuFileDriver* const driver = CuFileDriver::current();
  if (driver == nullptr) raise({Failure::Kind::Unavailable, 0, "cuFile's driver is not open", {}});
  return std::make_unique<CuFileQueue>(*driver);
}

}  // namespace

const Backend kCuFile{"cufile", [] { return Probe{CuFileDriver::current() != nullptr, "its driver is not open"}; },
                      open_queue};

}  // namespace nvme_ops
