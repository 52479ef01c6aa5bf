#include "engine/validate.h"

#include <errno.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/limits.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {
namespace {

constexpr std::uint64_t kChunk = 4 * kHugePage;

}  // namespace

void compare_with_file(Engine& engine, const std::shared_ptr<SharedFile>& file, std::byte* scratch,
                       std::uint64_t offset, std::uint64_t bytes, const std::byte* expected,
                       const Interrupted& interrupted) {
  const auto back =
      std::make_shared<Job>(Op::Read, std::vector<Extent>{{file, scratch, bytes, offset, true, false, true}});
  engine.run(back, interrupted);
  back->outcome()->raise_failure();
  if (std::memcmp(scratch, expected, bytes) == 0) return;
  const auto at = static_cast<std::uint64_t>(std::mismatch(scratch, scratch + bytes, expected).first - scratch);
  raise({Failure::Kind::Mismatch, EIO,
         "validation failed: file and tensor differ at offset " + std::to_string(offset + at), file->file().path()});
}

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
      compare_with_file(engine, file, scratch.get(), extent.offset + position, bytes, extent.memory + position,
                        interrupted);
    }
  }
}

}  // namespace nvme_ops
