// split(): shares cover a job exactly once.
#include "check.h"
#include "engine/split.h"
#include "support.h"

using namespace nvme_ops;
using support::Random;

namespace {

struct Span {
  std::size_t extent;
  std::uint64_t from, to;
};

std::vector<Span> spans(const Share& share) {
  std::vector<Span> found;
  for (std::size_t i = share.first; i <= share.last; ++i) {
    const std::uint64_t from = i == share.first ? share.skip : 0;
    const std::uint64_t to = i == share.last ? share.stop : share.job->extents()[i].bytes;
    if (from != to) found.push_back({i, from, to});
  }
  return found;
}

std::shared_ptr<SharedFile> some_file() {
  static const std::shared_ptr<SharedFile> file = support::shared(support::directory() / "split", Op::Write);
  return file;
}

std::shared_ptr<Job> job_with(const std::vector<std::uint64_t>& sizes, std::uint64_t gap, std::uint64_t offset) {
  std::vector<Extent> extents;
  for (const std::uint64_t bytes : sizes) {
    extents.push_back({some_file(), nullptr, bytes, offset, false});
    offset += bytes + gap;
  }
  return support::job_of(Op::Write, std::move(extents));
}

void check_shares(const std::shared_ptr<Job>& job, std::size_t lanes) {
  const std::vector<Share> shares = split(job, lanes);
  CHECK(!shares.empty() && shares.size() <= lanes, "1 to " << lanes << " shares, got " << shares.size());
  std::vector<std::uint64_t> reached(job->extents().size());
  for (const Share& share : shares) {
    CHECK(share.first <= share.last && share.last < reached.size(), "extents in order within the job");
    for (const Span& span : spans(share)) {
      CHECK(span.from < span.to, "a share to go forward, got " << span.from << " to " << span.to);
      CHECK_EQUAL(reached[span.extent], span.from);
      reached[span.extent] = span.to;
      const Extent& extent = job->extents()[span.extent];
      if (span.to < extent.bytes) CHECK_EQUAL((extent.offset + span.to) % kMaxEdge, 0U);
    }
  }
  for (std::size_t i = 0; i < reached.size(); ++i) CHECK_EQUAL(reached[i], job->extents()[i].bytes);
}

}  // namespace

TEST(shares_cover_every_byte_once_and_cut_at_edges) {
  const unsigned long iterations = check::from_environment("NVME_OPS_TEST_ITERATIONS", 1000);
  for (unsigned long seed = 1; seed <= iterations; ++seed) {
    const check::Context context("seed " + std::to_string(seed));
    Random random(seed);
    std::vector<std::uint64_t> sizes(support::between(random, 1, 8));
    const std::uint64_t most = std::uint64_t{1} << support::between(random, 0, 40);
    for (std::uint64_t& bytes : sizes) bytes = support::one_in(random, 6) ? 0 : support::between(random, 1, most);
    check_shares(job_with(sizes, support::between(random, 0, 5000), support::between(random, 0, 100000)),
                 support::between(random, 1, 9));
  }
}

TEST(one_extent_is_shared_evenly) {
  const std::uint64_t bytes = (std::uint64_t{5} << 30) + 12345;
  for (std::size_t lanes = 1; lanes <= 7; ++lanes) {
    const std::vector<Share> shares = split(job_with({bytes}, 0, 777), lanes);
    CHECK_EQUAL(shares.size(), lanes);
    for (const Share& share : shares) {
      const std::uint64_t size = share.stop - share.skip;
      CHECK(size <= bytes / lanes + 2 * kMaxEdge, "nearly equal shares of " << bytes << ", got " << size);
    }
  }
}

TEST(small_extents_go_to_a_lane_each) {
  for (const std::size_t lanes : {std::size_t{2}, std::size_t{5}}) {
    const std::vector<Share> shares = split(job_with(std::vector<std::uint64_t>(lanes, 1000), 0, 0), lanes);
    CHECK_EQUAL(shares.size(), lanes);
    for (const Share& share : shares) CHECK_EQUAL(spans(share).size(), 1U);
  }
}

TEST(what_is_smaller_than_an_edge_stays_whole) {
  CHECK_EQUAL(split(job_with({1}, 0, 5), 8).size(), std::size_t{1});
  CHECK_EQUAL(split(job_with({4096}, 0, 0), 8).size(), std::size_t{1});
  check_shares(job_with({0}, 0, 0), 8);
  check_shares(job_with({0, 0, 0}, 0, 0), 2);
}
