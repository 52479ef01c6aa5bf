// Residency: what is asked about the page cache, and what comes of it.
#include <set>
#include <utility>

#include "check.h"
#include "engine/residency.h"
#include "support.h"

using namespace nvme_ops;
using support::Random;

namespace {

constexpr std::uint64_t kPage = 4096;

// A file whose cached pages are known, and how often it was asked.
struct Cached {
  std::set<std::uint64_t> pages;
  unsigned asked = 0;

  std::pair<std::uint64_t, std::uint64_t> operator()(std::uint64_t offset, std::uint64_t bytes) {
    ++asked;
    const std::uint64_t first = offset / kPage, last = (offset + bytes - 1) / kPage;
    const auto found = std::distance(pages.lower_bound(first), pages.upper_bound(last));
    return {static_cast<std::uint64_t>(found), last - first + 1};
  }
};

// How many pieces of a run are said to be there in full; each must be what the file says of it alone.
unsigned resident_pieces(Cached& file, std::uint64_t start, std::uint64_t end, std::uint64_t piece) {
  Residency known;
  Cached truth = file;
  unsigned found = 0;
  for (std::uint64_t at = start; at < end; at += piece) {
    const std::uint64_t bytes = std::min(piece, end - at);
    const bool resident = known.covers(at, bytes, end, file);
    const auto [there, all] = truth(at, bytes);
    CHECK_EQUAL(resident, there == all);
    found += resident ? 1 : 0;
  }
  return found;
}

}  // namespace

TEST(a_resident_run_is_asked_about_once) {
  Cached file;
  for (std::uint64_t page = 0; page < 1000; ++page) file.pages.insert(page);
  CHECK_EQUAL(resident_pieces(file, 100, 1000 * kPage, 4 * kPage), 250U);
  CHECK_EQUAL(file.asked, 1U);
}

TEST(one_border_costs_about_a_logarithm) {
  Cached file;
  for (std::uint64_t page = 0; page < 500; ++page) file.pages.insert(page);
  CHECK_EQUAL(resident_pieces(file, 0, 1024 * kPage, kPage), 500U);
  CHECK(file.asked < 40, "less than 40 questions for 1024 pieces, got " << file.asked);
}

TEST(whatever_is_cached_each_piece_is_judged_as_if_asked_about_alone) {
  Random random(check::from_environment("NVME_OPS_TEST_SEED", 1));
  for (int round = 0; round < 300; ++round) {
    Cached file;
    const std::uint64_t pages = support::between(random, 1, 300);
    for (std::uint64_t page = 0; page < pages;) {
      const std::uint64_t run = support::between(random, 1, 40);
      if (support::one_in(random, 2)) {
        for (std::uint64_t i = page; i < page + run; ++i) file.pages.insert(i);
      }
      page += run;
    }
    const std::uint64_t start = support::between(random, 0, pages * kPage - 1);
    resident_pieces(file, start, pages * kPage, support::between(random, 1, 20 * kPage));
  }
}

TEST(what_was_wrong_is_asked_again) {
  Cached file;
  for (std::uint64_t page = 0; page < 8; ++page) file.pages.insert(page);
  Residency known;
  CHECK(known.covers(0, kPage, 8 * kPage, file), "resident");
  file.pages.clear();
  known.forget();
  CHECK(!known.covers(0, kPage, 8 * kPage, file), "gone");
  CHECK_EQUAL(file.asked, 2U);
}
