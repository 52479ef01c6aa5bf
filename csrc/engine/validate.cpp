#include "engine/validate.h"

#include <errno.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/limits.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {
namespace {

constexpr std::uint64_t kChunk = 4 * kHugePage;

}  // namespace

void validate(Engine& engine, const Job& job, const Interrupted& interrupted) {
  const std::unique_ptr<std::byte, void (*)(std::byte*)> scratch(
      BufferPool::instance().allocate(kChunk),
      [](std::byte* memory) { BufferPool::instance().release(memory, kIdleBytes); });
  for (const Extent& extent : job.extents()) {
    const std::shared_ptr<SharedFile> file =
        reader_of(extent.file, job.op() == Op::Write ? Cache::Direct : Cache::Buffered);
    const FileHold open(file);
    for (std::uint64_t position = 0; position < extent.bytes; position += kChunk) {
      const std::uint64_t bytes = std::min(kChunk, extent.bytes - position);
      const std::uint64_t offset = extent.offset + position;
      const auto back =
          std::make_shared<Job>(Op::Read, std::vector<Extent>{{file, scratch.get(), bytes, offset, true, false, true}});
      engine.run(back, interrupted);
      if (const auto& failure = back->outcome()->failure()) raise(*failure);
      if (std::memcmp(scratch.get(), extent.memory + position, bytes) == 0) continue;
      const auto difference = std::mismatch(scratch.get(), scratch.get() + bytes, extent.memory + position).first;
      raise(mismatch(offset + static_cast<std::uint64_t>(difference - scratch.get()), file->file().path()));
    }
  }
}

Failure mismatch(std::uint64_t offset, const std::string& path) {
  return {Failure::Kind::Mismatch, EIO, "validation failed: file and tensor differ at offset " + std::to_string(offset),
          path};
}

}  // namespace nvme_ops
