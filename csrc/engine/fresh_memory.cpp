#include "engine/fresh_memory.h"

#include <sys/mman.h>

#include "base/limits.h"

namespace nvme_ops {
namespace {

bool has_page(std::byte* page) {
  unsigned char there = 0;
  return ::mincore(page, kPageSize, &there) != 0 || (there & 1) != 0;
}

}  // namespace

void expect_to_fill(std::byte* memory, std::uint64_t bytes) noexcept {
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  auto* const first = reinterpret_cast<std::byte*>(begin);
  if (has_page(first) || has_page(reinterpret_cast<std::byte*>(end - kHugePage))) return;
  ::madvise(first, end - begin, MADV_HUGEPAGE);  // a wish: kernels without huge pages refuse it
}

}  // namespace nvme_ops
