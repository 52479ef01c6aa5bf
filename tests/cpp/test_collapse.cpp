// Collapse: small pages become huge ones while others use them, and nothing is touched after stop().
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "engine/collapse.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

constexpr std::size_t kBytes = 8 * kHugePage;
constexpr int kMadviseCollapse = 25;

// Memory in small pages, each of which begins with its number.
class SmallPages {
public:
  SmallPages() {
    room_ = ::mmap(nullptr, kBytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto start = (reinterpret_cast<std::uintptr_t>(room_) + kHugePage - 1) / kHugePage * kHugePage;
    data = reinterpret_cast<std::byte*>(start);
    ::madvise(data, kBytes, MADV_NOHUGEPAGE);
    for (std::size_t page = 0; page < kBytes / kPageSize; ++page) number(page) = page;
    ::madvise(data, kBytes, MADV_HUGEPAGE);
  }
  ~SmallPages() { ::munmap(room_, kBytes + kHugePage); }

  std::size_t& number(std::size_t page) { return *reinterpret_cast<std::size_t*>(data + page * kPageSize); }

  bool intact() {
    for (std::size_t page = 0; page < kBytes / kPageSize; ++page) {
      if (number(page) != page) return false;
    }
    return true;
  }

  // Of the mapping the memory lies in, which may be part of a larger one.
  std::size_t huge_bytes() const {
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool here = false;
    std::size_t found = 0;
    while (std::getline(smaps, line)) {
      std::size_t begin = 0, end = 0, kib = 0;
      if (std::sscanf(line.c_str(), "%zx-%zx ", &begin, &end) == 2) {
        here = begin < reinterpret_cast<std::uintptr_t>(data) + kBytes && reinterpret_cast<std::uintptr_t>(data) < end;
      } else if (here && std::sscanf(line.c_str(), "AnonHugePages: %zu kB", &kib) == 1) {
        found += kib << 10;
      }
    }
    return found;
  }

  std::byte* data;

private:
  void* room_;
};

bool kernel_collapses() {
  SmallPages pages;
  return ::madvise(pages.data, kHugePage, kMadviseCollapse) == 0;
}

template <class Condition>
bool comes_true(Condition&& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

}  // namespace

TEST(small_pages_become_huge_while_they_are_used) {
  if (!kernel_collapses()) return check::skipped("the kernel has no MADV_COLLAPSE, or no huge page at the moment");
  SmallPages pages;
  const auto collapse = Collapse::start(pages.data, kBytes);
  CHECK(collapse != nullptr, "a thread was to be had");
  bool wrong = false;
  CHECK(comes_true([&] {
          wrong |= !pages.intact();
          return pages.huge_bytes() == kBytes;
        }),
        "huge: " << pages.huge_bytes() << " of " << kBytes);
  CHECK(!wrong && pages.intact(), "every byte is where it was");
  collapse->stop();
}

TEST(nothing_is_touched_after_stop) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    SmallPages pages;
    const auto collapse = Collapse::start(pages.data, kBytes, std::chrono::milliseconds(0));
    if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(between(random, 0, 30)));
    collapse->stop();
    collapse->stop();
    CHECK(pages.intact(), "every byte is where it was");
  }
}

TEST(a_child_stops_what_its_parent_began) {
  SmallPages pages;
  const auto collapse = Collapse::start(pages.data, kBytes);
  const pid_t child = ::fork();
  if (child == 0) {
    collapse->stop();
    ::_exit(pages.intact() ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQUAL(status, 0);
  collapse->stop();
}

TEST(without_a_whole_huge_page_there_is_nothing_to_do) {
  SmallPages pages;
  CHECK(Collapse::start(pages.data + 1, kHugePage) == nullptr, "no huge page lies in it");
  CHECK(Collapse::start(pages.data, 0) == nullptr, "no byte");
}
