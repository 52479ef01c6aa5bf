// Functions compiled in several versions, of which the loader takes the one for this processor.
#pragma once

#include <cstring>

// All that is called from a function of several versions is inlined into each of these.
#define NVME_INLINED __attribute__((always_inline))
#define NVME_INLINE inline NVME_INLINED
#if !defined(__x86_64__) || defined(__clang__)
#define NVME_VERSIONS
#elif __GNUC__ >= 12
#define NVME_VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NVME_VERSIONS __attribute__((target_clones("avx2", "default")))
#endif

namespace nvme_ops {

// The same bits as another type.
template <class To, class From>
NVME_INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To made;
  std::memcpy(&made, &value, sizeof made);
  return made;
}

}  // namespace nvme_ops
