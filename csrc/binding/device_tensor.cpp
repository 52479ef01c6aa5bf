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
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/limits.h"
#include "engine/device_chunks.h"
#include "engine/validate.h"

namespace nvme_ops {

struct DeviceTensor {
  at::Tensor flat;  // all of the tensor's memory, as bytes
  std::optional<c10::Event> before;
};

namespace {

constexpr std::uint64_t kChunk = 8 << 20;  // a power of two, to which torch's allocator of page-locked memory rounds up
constexpr std::size_t kChunks = 5;         // 40 MiB
constexpr std::size_t kOnDeviceSide = 2;   // on the device side; the others are on the storage side, which is slower

at::Tensor page_locked(const at::Tensor& like, std::uint64_t bytes) {
  const auto options = like.options().device(c10::kCPU).pinned_memory(true);
  try {
    return like.new_empty({static_cast<std::int64_t>(bytes)}, options);
  } catch (const c10::Error&) {  // a device without page-locked memory: copies from ordinary memory
    return like.new_empty({static_cast<std::int64_t>(bytes)}, options.pinned_memory(false));
  }
}

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// Converts torch's errors to ours.
template <class Body>
void translated(Body&& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    raise(unavailable(std::string("copying to or from the device: ") + error.what_without_backtrace()));
  }
}

at::Tensor part_of(const at::Tensor& tensor, std::uint64_t from, std::uint64_t bytes) {
  return tensor.narrow(0, static_cast<std::int64_t>(from), static_cast<std::int64_t>(bytes));
}

// One page-locked chunk in flight: first filled (from storage or the device), then emptied to the other side.
struct Slot {
  at::Tensor memory;
  std::vector<ChunkPart> parts;
  std::shared_ptr<Job> job;        // its storage transfer
  std::optional<c10::Event> copy;  // its device copy
  const unsigned long generation = fork_generation();

  // However the transfer ends, nothing may still use the memory. A forked child has a copy of its own.
  ~Slot() {
    while (job && generation == fork_generation() &&
           !job->outcome()->wait_for(std::chrono::milliseconds(kInterruptMilliseconds))) {
    }
  }
};

// The same for the device: destroyed before the slots.
struct StreamEnd {
  const c10::Stream stream;

  ~StreamEnd() {
    try {
      stream.synchronize();
    } catch (const c10::Error&) {  // the device has failed: it copies nothing more
    }
  }
};

// Moves the chunks of extents whose tensors are on one device.
class Ring {
public:
  Ring(const DeviceTransfer& transfer, const DeviceExtent* extents, std::size_t count)
      : transfer_(transfer),
        extents_(extents),
        like_(extents[0].tensor->flat),
        guard_(like_.device().type()),
        side_(guard_.getStreamFromGlobalPool(like_.device())),
        holds_(count) {
    for (std::size_t i = 0; i < count; ++i) {
      const DeviceExtent& extent = extents[i];
      if (extent.bytes > 0)
        parts_.push_back({i, extent.position, extent.bytes, extent.offset, number_of(extent.file.get())});
      total_ += extent.bytes + (i == 0 ? extent.offset % kPageSize : kPageSize);
    }
  }

  // Moves all chunks. Throws IoError.
  void run() {
    for (std::size_t i = 0; i < holds_.size(); ++i) {
      if (extents_[i].bytes == 0) enter(i), leave(i);
    }
    DeviceChunks chunks(parts_, kChunk);
    const StreamEnd end{side_.current_stream()};
    // Chunks whose first half is in flight, ahead of the second halves.
    const std::size_t lead = transfer_.op == Op::Read ? kChunks - kOnDeviceSide : kOnDeviceSide;
    std::size_t begun = 0, turned = 0;
    for (bool more = true; more || turned < begun;) {
      if (more && !failure_) {
        Slot& slot = slots_[begun % kChunks];
        finish(slot);
        if (!failure_) slot.parts = chunks.next();
        more = !failure_ && !slot.parts.empty();
        if (more) begin(slot), ++begun;
      }
      if (failure_) break;
      if (turned < begun && (!more || begun - turned > lead)) turn(slots_[turned++ % kChunks]);
    }
    for (Slot& slot : slots_) finish(slot);
    side_.current_stream().synchronize();
    if (failure_) raise(*failure_);
  }

private:
  std::size_t number_of(const SharedFile* file) {
    if (file != last_file_) ++files_;
    last_file_ = file;
    return files_;
  }

  at::Tensor on_device(const ChunkPart& part) const {
    const DevicePart& whole = parts_[part.part];
    return part_of(extents_[whole.tensor].tensor->flat, whole.position + part.from, part.bytes);
  }

  void begin(Slot& slot) {
    if (!slot.memory.defined()) slot.memory = page_locked(like_, std::min(total_, kChunk));
    for (const ChunkPart& part : slot.parts) {
      if (part.first) enter(parts_[part.part].tensor);
    }
    transfer_.op == Op::Read ? start_storage(slot) : start_copy(slot);
  }
  // Starts a chunk's second half as soon as the first has ended.
  void turn(Slot& slot) {
    transfer_.op == Op::Read ? end_storage(slot) : end_copy(slot);
    if (!failure_) transfer_.op == Op::Read ? start_copy(slot) : start_storage(slot);
  }
  void finish(Slot& slot) {
    end_storage(slot);
    end_copy(slot);
    slot.parts.clear();
  }

  // Waits for the work queued on the tensor, opens the file and makes it long enough.
  void enter(std::size_t index) {
    const DeviceExtent& extent = extents_[index];
    extent.tensor->before->block(side_.current_stream());
    holds_[index].emplace(extent.file);
    bool prepared = extent.prepared;
    extent.file->prepare(&prepared, transfer_.op, extent.offset, extent.bytes, extent.whole);
  }
  void leave(std::size_t index) {
    const int error = holds_[index]->end();
    if (error != 0 && transfer_.op == Op::Write && !failure_) {
      failure_ = system_failure(error, "closing the file", holds_[index]->path());
    }
    holds_[index].reset();
  }

  void start_storage(Slot& slot) {
    const DeviceChunks judge(parts_, kChunk);
    std::vector<Extent> extents;
    const ChunkPart* before = nullptr;
    for (const ChunkPart& part : slot.parts) {
      const DevicePart& whole = parts_[part.part];
      if (before != nullptr && judge.joins(*before, part)) {
        extents.back().bytes += part.bytes;
      } else {
        extents.push_back({extents_[whole.tensor].file, bytes_of(slot.memory) + part.place, part.bytes,
                           whole.offset + part.from, true, false, true});
      }
      before = &part;
    }
    Tool tool = transfer_.tool;
    if (transfer_.op == Op::Read && tool.lanes == 0)
      tool.lanes = transfer_.engine.lanes_for_cached(cached_bytes(extents));
    slot.job = std::make_shared<Job>(transfer_.op, std::move(extents), transfer_.priority, tool);
    transfer_.engine.submit(slot.job);
  }
  // Returns the bytes of the extents if the page cache has them all, else 0.
  static std::uint64_t cached_bytes(const std::vector<Extent>& extents) {
    std::uint64_t total = 0;
    for (const Extent& extent : extents) {
      File& file = extent.file->file();
      Residency unknown;
      if (file.cache() != Cache::Auto || !file.direct_possible() ||
          !file.resident(unknown, extent.offset, extent.bytes, extent.offset + extent.bytes)) {
        return 0;
      }
      total += extent.bytes;
    }
    return total;
  }
  void end_storage(Slot& slot) {
    if (!slot.job) return;
    wait(*slot.job, transfer_.interrupted);
    if (const auto& failed = slot.job->outcome()->failure(); failed && !failure_) failure_ = failed;
    slot.job.reset();
    for (const ChunkPart& part : slot.parts) {
      if (part.last) leave(parts_[part.part].tensor);
    }
  }
  void start_copy(Slot& slot) {
    for (const ChunkPart& part : slot.parts) {
      const at::Tensor host = part_of(slot.memory, part.place, part.bytes);
      transfer_.op == Op::Read ? on_device(part).copy_(host, true) : host.copy_(on_device(part), true);
    }
    slot.copy.emplace(like_.device().type());
    slot.copy->record(side_.current_stream());
  }
  void end_copy(Slot& slot) {
    if (slot.copy) slot.copy->synchronize();
    slot.copy.reset();
  }

  const DeviceTransfer& transfer_;
  const DeviceExtent* const extents_;
  const at::Tensor& like_;
  const c10::impl::VirtualGuardImpl guard_;
  // Makes a side stream current while the ring lives; restores the caller's device and stream at its end.
  const c10::StreamGuard side_;
  std::vector<DevicePart> parts_;
  std::uint64_t total_ = 0;
  const SharedFile* last_file_ = nullptr;
  std::size_t files_ = 0;
  std::vector<std::optional<FileHold>> holds_;  // by extent
  std::array<Slot, kChunks> slots_;
  std::optional<Failure> failure_;
};

}  // namespace

std::shared_ptr<DeviceTensor> device_tensor(c10::TensorImpl* tensor) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  auto made = std::make_shared<DeviceTensor>();
  translated([&] {
    const c10::NoGradGuard no_grad;
    made->flat = at::Tensor(Pointer::unsafe_reclaim_from_nonowning(tensor)).detach().view({-1}).view(c10::kByte);
    const c10::impl::VirtualGuardImpl device(made->flat.device().type());
    made->before.emplace(made->flat.device().type());
    made->before->record(device.getStream(made->flat.device()));
  });
  return made;
}

std::byte* data_of(const DeviceTensor& tensor) {
  return bytes_of(tensor.flat);
}

void synchronize(const DeviceTensor& tensor) {
  translated([&] { tensor.before->synchronize(); });
}

void compare(Engine& engine, const DeviceTensor& tensor, const std::shared_ptr<SharedFile>& file, std::uint64_t offset,
             const Interrupted& interrupted) {
  translated([&] {
    const c10::InferenceMode plain_memory;
    const auto total = static_cast<std::uint64_t>(tensor.flat.numel());
    const at::Tensor stored = page_locked(tensor.flat, std::min(total, kChunk));
    for (std::uint64_t position = 0; position < total; position += kChunk) {
      const std::uint64_t bytes = std::min(kChunk, total - position);
      const at::Tensor here = part_of(tensor.flat, position, bytes).to(c10::kCPU);
      compare_with_file(engine, file, bytes_of(stored), offset + position, bytes,
                        static_cast<const std::byte*>(here.const_data_ptr()), interrupted);
    }
  });
}

void bounce(const DeviceTransfer& transfer) {
  const std::vector<DeviceExtent>& extents = transfer.extents;
  translated([&] {
    const c10::InferenceMode plain_memory;  // no autograd; inference tensors may be filled too
    for (std::size_t first = 0; first < extents.size();) {
      const c10::Device device = extents[first].tensor->flat.device();
      std::size_t next = first + 1;
      while (next < extents.size() && extents[next].tensor->flat.device() == device) ++next;
      Ring(transfer, &extents[first], next - first).run();
      first = next;
    }
  });
}

}  // namespace nvme_ops
