// Anything goes: random transfers against a reference in memory, on every backend and through the fake one's mischief.
// NVME_OPS_TEST_ITERATIONS says how many, NVME_OPS_TEST_SEED where to begin; a failure names its seed.
#include <algorithm>
#include <numeric>

#include "check.h"
#include "engine/engine.h"
#include "engine/spans.h"
#include "fake_backend.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

struct Range {
  std::uint64_t offset, bytes;
};

struct Plan {
  const Backend* backend;
  EngineOptions options;
  Cache cache;
  std::string path;
  std::uint64_t file_bytes;
  std::vector<Range> ranges;
  std::vector<std::size_t> skews;
  std::vector<std::vector<std::uint64_t>> parts;  // of each range, where its memory is scattered
  bool fast_memory, by_descriptor, all_lanes;
};

// Often on a boundary, where mistakes are.
std::uint64_t any_size(Random& random, std::uint64_t most) {
  const std::uint64_t size = between(random, 0, std::min(most, std::uint64_t{1} << between(random, 1, 23)));
  return one_in(random, 3) ? size - size % 4096 : one_in(random, 4) ? size - size % 512 : size;
}

template <class Value>
Value any_of(Random& random, std::initializer_list<Value> values) {
  return values.begin()[between(random, 0, values.size() - 1)];
}

Plan random_plan(Random& random, const std::vector<const Backend*>& backends, const std::string& folder) {
  Plan plan{};
  plan.backend = backends[between(random, 0, backends.size() - 1)];
  plan.cache = any_of(random, {Cache::Auto, Cache::Direct, Cache::Buffered});
  plan.path = folder + "/random";
  plan.file_bytes = any_size(random, 4 << 20);
  std::uint64_t offset = any_size(random, plan.file_bytes), total = 0;
  const std::uint64_t count = one_in(random, 2) ? 1 : between(random, 1, 12);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t bytes = any_size(random, (4 << 20) / count);
    plan.ranges.push_back({offset, bytes});
    plan.skews.push_back(one_in(random, 3)   ? 0
                         : one_in(random, 2) ? 512 * between(random, 0, 7)
                                             : between(random, 0, 4095));
    plan.parts.emplace_back();
    if (one_in(random, 2)) {
      const std::uint64_t most = any_of<std::uint64_t>(random, {20, 4096, 70000, 3 << 20});
      for (std::uint64_t left = bytes; left > 0; left -= plan.parts.back().back()) {
        plan.parts.back().push_back(plan.parts.back().size() > 2000 ? left : between(random, 0, std::min(left, most)));
      }
    }
    offset += bytes + (one_in(random, 2) ? 0 : any_size(random, 20000));
    total += bytes;
  }
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const Plan sorted = plan;
  for (std::size_t i = 0; i < count; ++i) {
    plan.ranges[i] = sorted.ranges[order[i]];
    plan.parts[i] = sorted.parts[order[i]];
  }
  const std::uint64_t block =
      any_of<std::uint64_t>(random, {1, 511, 3000, 4096, 8192, 65536, 1 << 20, 5 << 20, std::uint64_t{1} << 40});
  plan.options = {{plan.backend},
                  std::max(block, total / 1000),
                  any_of<std::uint64_t>(random, {1, 2, 3, 8, 32, 5000}),
                  one_in(random, 2),
                  one_in(random, 2),
                  between(random, 1, 5)};
  plan.fast_memory = one_in(random, 2);
  plan.by_descriptor = one_in(random, 4);
  plan.all_lanes = one_in(random, 2);
  return plan;
}

// The parts lie in memory in the opposite order, so that none may be taken for its neighbour.
Bytes reordered(const Bytes& data, const std::vector<std::uint64_t>& parts) {
  Bytes result(data.size());
  auto from = data.begin();
  auto to = result.end();
  for (const std::uint64_t part : parts) {
    to -= static_cast<std::ptrdiff_t>(part);
    std::copy_n(from, part, to);
    from += static_cast<std::ptrdiff_t>(part);
  }
  return parts.empty() ? data : result;
}

std::shared_ptr<const Spans> spans_of(std::byte* memory, std::uint64_t bytes, const std::vector<std::uint64_t>& parts) {
  if (parts.empty()) return nullptr;
  const auto spans = std::make_shared<Spans>();
  std::byte* place = memory + bytes;
  for (const std::uint64_t part : parts) spans->add({place -= part, part});
  return spans;
}

// Mischief that must not be noticed: nothing here is an error.
void script_mischief(std::uint64_t seed) {
  fake::Script& script = fake::new_script();
  const auto random = std::make_shared<Random>(seed);
  const std::uint64_t rarity = any_of<std::uint64_t>(*random, {2, 5, 50});
  const bool refuses_direct = one_in(*random, 8);
  script.registers = one_in(*random, 2);
  script.judge = [=](const Request& request, bool direct) {
    fake::Verdict verdict{UINT64_MAX, 0, static_cast<unsigned>(between(*random, 0, 3))};
    if (refuses_direct && direct && one_in(*random, 3)) return fake::Verdict{0, EINVAL, verdict.delay};
    if (!one_in(*random, rarity)) return verdict;
    if (one_in(*random, 2)) return fake::Verdict{0, one_in(*random, 2) ? EAGAIN : EINTR, verdict.delay};
    verdict.bytes = between(*random, 1, request.bytes);
    return verdict;
  };
  script.take = [=](std::size_t offered) { return one_in(*random, rarity) ? between(*random, 0, offered) : offered; };
  script.choose = [=](std::size_t finished) { return between(*random, 0, finished - 1); };
}

std::shared_ptr<SharedFile> file_of(const Plan& plan, Op op) {
  if (!plan.by_descriptor) return support::shared(plan.path, op, plan.cache);
  const auto fd = std::make_shared<UniqueFd>(::open(plan.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  return std::make_shared<SharedFile>(
      plan.path, [fd, op, cache = plan.cache](const std::string&) { return File::adopt(fd->get(), op, cache); });
}

// Some of it in the page cache, some not.
void stir_cache(Random& random, const Plan& plan) {
  if (one_in(random, 4)) return;
  support::evict(plan.path);
  if (one_in(random, 2)) return;
  const UniqueFd fd(::open(plan.path.c_str(), O_RDONLY | O_CLOEXEC));
  ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_RANDOM);
  Bytes scratch(100000);
  for (int i = 0; i < 4; ++i) {
    const auto offset = static_cast<off_t>(between(random, 0, plan.file_bytes));
    static_cast<void>(!::pread(fd.get(), scratch.data(), between(random, 1, scratch.size()), offset));
  }
}

void move(Engine& engine, const Plan& plan, Op op, const std::vector<Memory>& memories) {
  const auto file = file_of(plan, op);
  std::vector<Extent> extents;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < plan.ranges.size(); ++i) {
    const auto [offset, bytes] = plan.ranges[i];
    extents.push_back({file, memories[i].data(), bytes, offset, plan.fast_memory});
    extents.back().spans = spans_of(memories[i].data(), bytes, plan.parts[i]);
    if (extents.back().spans) extents.back().memory = nullptr;
    total += plan.ranges[i].bytes;
  }
  const auto job = support::job_of(op, std::move(extents));
  plan.all_lanes ? engine.submit(job) : engine.run(job, support::never);
  wait(*job, support::never);
  CHECK(!job->outcome()->failure(),
        "the " << name_of(op) << " to succeed, not " << check::described(job->outcome()->failure()));
  CHECK_EQUAL(job->outcome()->bytes(), job->outcome()->failure() ? 0 : total);
  for (const Memory& memory : memories) CHECK(memory.guards_intact(), "nothing written beside the memory");
}

void round_trip(Random& random, const Plan& plan, unsigned long seed) {
  std::filesystem::remove(plan.path);
  Bytes expected = support::pattern(plan.file_bytes, seed);
  support::write_file(plan.path, expected);
  stir_cache(random, plan);
  std::vector<Memory> sources, targets;
  for (std::size_t i = 0; i < plan.ranges.size(); ++i) {
    const auto [offset, bytes] = plan.ranges[i];
    const Bytes data = support::pattern(bytes, seed * 100 + i);
    sources.emplace_back(bytes, plan.skews[i]);
    sources.back().set(reordered(data, plan.parts[i]));
    targets.emplace_back(bytes, plan.skews[plan.skews.size() - 1 - i]);
    if (bytes == 0) continue;
    expected.resize(std::max<std::size_t>(expected.size(), offset + bytes));
    std::copy(data.begin(), data.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  Engine engine(plan.options);
  move(engine, plan, Op::Write, sources);
  const Bytes written = support::read_file(plan.path);
  CHECK_EQUAL(written.size(), expected.size());
  if (written.size() == expected.size()) {
    CHECK_EQUAL(support::difference(written.data(), expected.data(), written.size()), written.size());
  }
  stir_cache(random, plan);
  move(engine, plan, Op::Read, targets);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    CHECK_EQUAL(support::difference(targets[i].data(), sources[i].data(), targets[i].size()), targets[i].size());
  }
}

void many(const std::string& folder, unsigned long iterations) {
  std::vector<const Backend*> backends = support::usable_backends();
  for (std::size_t real = backends.size(); real > 0; --real) backends.push_back(&fake::kFake);  // half of all cases
  const unsigned long first = check::from_environment("NVME_OPS_TEST_SEED", 1);
  for (unsigned long seed = first; seed < first + iterations && check::failures() < 10; ++seed) {
    Random random(seed);
    script_mischief(seed);
    const Plan plan = random_plan(random, backends, folder);
    const check::Context context("seed " + std::to_string(seed) + ", " + plan.backend->name);
    round_trip(random, plan, seed);
  }
}

}  // namespace

TEST(any_transfer_on_a_disk) {
  const support::Directory folder;
  many(folder / ".", check::from_environment("NVME_OPS_TEST_ITERATIONS", 300));
}

TEST(any_transfer_in_memory) {
  if (::access("/dev/shm", W_OK) != 0) {
    check::skipped("no /dev/shm to write to");
    return;
  }
  const support::Directory folder("/dev/shm");
  many(folder / ".", check::from_environment("NVME_OPS_TEST_ITERATIONS", 300) / 3 + 1);
}
