#include "binding/device_tensor.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/error.h"
#include "base/fork.h"
#include "base/limits.h"
#include "engine/validate.h"

namespace nvme_ops {
namespace {

constexpr std::uint64_t kChunk = 8 << 20;  // a power of two, to which torch's allocator of page-locked memory rounds up
constexpr std::size_t kChunks = 5;         // 40 MiB
constexpr std::size_t kOnDeviceSide = 2;   // of them; the others are between memory and storage, the slower side

// One page-locked block on its way: first filled (from storage or the device), then emptied to the other side.
struct Slot {
  at::Tensor memory;
  std::uint64_t position = 0, bytes = 0, skew = 0;
  std::shared_ptr<Job> job;        // its storage transfer
  std::optional<c10::Event> copy;  // its device copy
  const unsigned long generation = fork_generation();

  // Whatever ends the transfer, nothing may still use the memory. A forked child's is its own.
  ~Slot() {
    while (job && generation == fork_generation() &&
           !job->outcome()->wait_for(std::chrono::milliseconds(kInterruptMilliseconds))) {
    }
  }
};

// The same for the device: goes before the slots do.
struct StreamEnd {
  const c10::Stream stream;

  ~StreamEnd() {
    try {
      stream.synchronize();
    } catch (const c10::Error&) {  // the device has failed: it copies nothing more
    }
  }
};

at::Tensor page_locked(const at::Tensor& like, std::uint64_t bytes) {
  const auto options = like.options().device(c10::kCPU).pinned_memory(true);
  try {
    return like.new_empty({static_cast<std::int64_t>(bytes)}, options);
  } catch (const c10::Error&) {  // a device without page-locked memory copies from any
    return like.new_empty({static_cast<std::int64_t>(bytes)}, options.pinned_memory(false));
  }
}

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// torch's errors become ours.
template <class Body>
void translated(Body&& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    raise({Failure::Kind::Internal,
           0,
           std::string("copying to or from the device: ") + error.what_without_backtrace(),
           {}});
  }
}

class StagedDeviceTensor final : public DeviceTensor {
public:
  explicit StagedDeviceTensor(const at::Tensor& tensor);
  void bounce(Engine& engine, Op op, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
              std::uint64_t position, std::uint64_t bytes, const Interrupted& interrupted) override;
  std::byte* data() const override { return bytes_of(flat_); }
  void synchronize() const override;
  void compare(Engine& engine, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
               const Interrupted& interrupted) override;

private:
  at::Tensor flat_;  // all of the tensor's memory, as bytes
  std::optional<c10::Event> before_;
};

StagedDeviceTensor::StagedDeviceTensor(const at::Tensor& tensor) {
  translated([&] {
    const c10::NoGradGuard no_grad;
    flat_ = tensor.detach().view({-1}).view(c10::kByte);
    const c10::impl::VirtualGuardImpl device(flat_.device().type());
    before_.emplace(flat_.device().type());
    before_->record(device.getStream(flat_.device()));
  });
}

void StagedDeviceTensor::synchronize() const {
  translated([&] { before_->synchronize(); });
}

void StagedDeviceTensor::bounce(Engine& engine, Op op, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
                                std::uint64_t position, std::uint64_t total, const Interrupted& interrupted) {
  translated([&] {
    const c10::InferenceMode plain_memory;  // no autograd; inference tensors may be filled too
    const c10::impl::VirtualGuardImpl device(flat_.device().type());
    // The side stream becomes current for this scope only; the caller's device and stream come back with it.
    const c10::StreamGuard side(device.getStreamFromGlobalPool(flat_.device()));
    before_->block(side.current_stream());

    // Chunks begin at pages of the file, all but the first, and memory and file are misaligned alike: so a chunk is
    // transferred in place, and of a write only the ends of the whole are left to the page cache.
    const std::uint64_t skew = offset % kPageSize;
    const std::uint64_t chunks = (skew + total + kChunk - 1) / kChunk;
    const std::size_t count = std::min<std::uint64_t>(kChunks, chunks);
    std::array<Slot, kChunks> slots;
    const StreamEnd end{side.current_stream()};
    std::optional<Failure> failure;

    const auto on_device = [&](const Slot& slot) {
      return flat_.narrow(0, static_cast<std::int64_t>(position + slot.position),
                          static_cast<std::int64_t>(slot.bytes));
    };
    const auto on_host = [&](const Slot& slot) {
      return slot.memory.narrow(0, static_cast<std::int64_t>(slot.skew), static_cast<std::int64_t>(slot.bytes));
    };
    const auto start_storage = [&](Slot& slot) {
      slot.job = std::make_shared<Job>(op, std::vector<Extent>{{file, bytes_of(slot.memory) + slot.skew, slot.bytes,
                                                                offset + slot.position, true, false, true}});
      engine.submit(slot.job);
    };
    const auto end_storage = [&](Slot& slot) {
      if (!slot.job) return;
      wait(*slot.job, interrupted);
      if (const auto& failed = slot.job->outcome()->failure(); failed && !failure) failure = failed;
      slot.job.reset();
    };
    const auto start_copy = [&](Slot& slot) {
      op == Op::Read ? on_device(slot).copy_(on_host(slot), true) : on_host(slot).copy_(on_device(slot), true);
      slot.copy.emplace(flat_.device().type());
      slot.copy->record(side.current_stream());
    };
    const auto end_copy = [&](Slot& slot) {
      if (slot.copy) slot.copy->synchronize();
      slot.copy.reset();
    };
    const auto begin = [&](Slot& slot, std::uint64_t chunk) {
      if (!slot.memory.defined()) slot.memory = page_locked(flat_, std::min(skew + total, kChunk));
      slot.skew = chunk == 0 ? skew : 0;
      slot.position = chunk == 0 ? 0 : chunk * kChunk - skew;
      slot.bytes = std::min(kChunk - slot.skew, total - slot.position);
      op == Op::Read ? start_storage(slot) : start_copy(slot);
    };
    // The second half follows as soon as the first has ended.
    const auto turn = [&](Slot& slot) {
      op == Op::Read ? end_storage(slot) : end_copy(slot);
      if (!failure) op == Op::Read ? start_copy(slot) : start_storage(slot);
    };
    const auto finish = [&](Slot& slot) {
      end_storage(slot);
      end_copy(slot);
    };

    // First halves under way ahead of the second ones.
    const std::size_t lead = op == Op::Read ? kChunks - kOnDeviceSide : kOnDeviceSide;
    for (std::uint64_t i = 0; i < chunks + lead; ++i) {
      if (i < chunks && !failure) {
        Slot& slot = slots[i % count];
        finish(slot);
        if (!failure) begin(slot, i);
      }
      if (i >= lead && !failure) turn(slots[(i - lead) % count]);
    }
    for (std::size_t i = 0; i < count; ++i) finish(slots[i]);
    side.current_stream().synchronize();
    if (failure) raise(*failure);
  });
}

void StagedDeviceTensor::compare(Engine& engine, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
                                 const Interrupted& interrupted) {
  translated([&] {
    const c10::InferenceMode plain_memory;
    const auto total = static_cast<std::uint64_t>(flat_.numel());
    const at::Tensor stored = page_locked(flat_, std::min(total, kChunk));
    for (std::uint64_t position = 0; position < total; position += kChunk) {
      const std::uint64_t bytes = std::min(kChunk, total - position);
      const auto job = std::make_shared<Job>(
          Op::Read, std::vector<Extent>{{file, bytes_of(stored), bytes, offset + position, true, false, true}});
      engine.run(job, interrupted);
      if (job->outcome()->failure()) raise(*job->outcome()->failure());
      const at::Tensor here =
          flat_.narrow(0, static_cast<std::int64_t>(position), static_cast<std::int64_t>(bytes)).to(c10::kCPU);
      const auto* const ours = static_cast<const std::byte*>(here.const_data_ptr());
      const auto* const difference = std::mismatch(ours, ours + bytes, bytes_of(stored)).first;
      if (difference != ours + bytes) {
        raise(mismatch(offset + position + static_cast<std::uint64_t>(difference - ours), file->file().path()));
      }
    }
  });
}

}  // namespace

std::shared_ptr<DeviceTensor> device_tensor(c10::TensorImpl* tensor) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return std::make_shared<StagedDeviceTensor>(at::Tensor(Pointer::unsafe_reclaim_from_nonowning(tensor)));
}

}  // namespace nvme_ops
