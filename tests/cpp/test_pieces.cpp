// next_piece(): pieces tile a range, and each is something that its route can move.
#include "check.h"
#include "engine/split.h"
#include "engine/staging.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

constexpr std::uint64_t kStaging = StagingArea::kChunk;

struct Case {
  Op op;
  Layout layout;
  std::uintptr_t memory;
  std::uint64_t offset, bytes, block;
};

void check_route(const Case& wanted, const Piece& piece, std::uintptr_t memory, std::uint64_t left) {
  const Layout& layout = wanted.layout;
  const bool read = wanted.op == Op::Read;
  const std::uint64_t unit = read ? layout.offset_alignment : layout.edge;
  CHECK(piece.length <= kMaxTransfer, "at most " << kMaxTransfer << " bytes in one call, got " << piece.length);
  if (piece.route == Route::Buffered) {
    CHECK(piece.lead == 0 && piece.length == piece.bytes, "a buffered piece to ask for what is wanted, no more");
    if (!layout.direct) {
      CHECK(piece.bytes <= wanted.block, "at most a block of " << wanted.block << ", got " << piece.bytes);
      return;
    }
    CHECK(!read, "direct reads wherever they are possible");
    const bool partial = piece.offset % layout.edge != 0 || (left < layout.edge && !layout.padded);
    CHECK(partial && piece.offset % layout.edge + piece.bytes <= layout.edge,
          "only part of one edge to be written through the cache, got " << piece.bytes << " at " << piece.offset);
    return;
  }
  CHECK(layout.direct, "no direct piece where direct I/O is not possible");
  CHECK(piece.length <= std::max(wanted.block, unit), "a block of " << wanted.block << ", got " << piece.length);
  CHECK_EQUAL((piece.offset - piece.lead) % layout.offset_alignment, 0U);
  CHECK_EQUAL(piece.length % layout.offset_alignment, 0U);
  CHECK(piece.lead + piece.bytes <= piece.length, "the wanted bytes inside what is transferred");
  if (piece.route == Route::InPlace) {
    CHECK(layout.in_place, "no transfer in place where it is not worth it");
    CHECK_EQUAL(memory % layout.memory_alignment, 0U);
    CHECK(piece.lead == 0 && piece.length == piece.bytes, "nothing beside the caller's memory to be touched");
  } else {
    CHECK(piece.length <= kStaging, "at most a staging block, got " << piece.length);
  }
  if (read) {
    CHECK(piece.length - piece.lead - piece.bytes < unit, "no whole sector read in vain");
  } else {
    const bool padded = layout.padded && piece.bytes == left && piece.length - piece.bytes < unit;
    CHECK(piece.offset % unit == 0 && piece.length % unit == 0 && (piece.length == piece.bytes || padded),
          "direct writes in whole edges of " << unit << ", got " << piece.length << " at " << piece.offset);
  }
}

void check_tiles(const Case& wanted) {
  std::uint64_t position = 0;
  while (position < wanted.bytes) {
    const std::uintptr_t memory = wanted.memory + position;
    const std::uint64_t left = wanted.bytes - position;
    const Piece piece =
        next_piece(wanted.op, wanted.layout, memory, wanted.offset + position, left, wanted.block, kStaging);
    CHECK_EQUAL(piece.offset, wanted.offset + position);
    CHECK(piece.bytes > 0 && piece.bytes <= left, "1 to " << left << " bytes, got " << piece.bytes);
    if (piece.bytes == 0 || piece.bytes > left) return;
    check_route(wanted, piece, memory, left);
    position += piece.bytes;
  }
}

Case random_case(Random& random) {
  Case made{};
  made.op = support::one_in(random, 2) ? Op::Read : Op::Write;
  made.layout.direct = !support::one_in(random, 5);
  made.layout.memory_alignment = std::uint64_t{1} << between(random, 0, 12);
  made.layout.offset_alignment = std::uint64_t{1} << between(random, 9, 16);
  made.layout.edge = std::max({kPageSize, made.layout.offset_alignment, std::uint64_t{1} << between(random, 12, 16)});
  made.layout.in_place = support::one_in(random, 2);
  made.layout.padded = support::one_in(random, 3);
  made.memory = 0x10000000 + (support::one_in(random, 2) ? 0 : between(random, 0, 8192));
  made.bytes = between(random, 1, std::uint64_t{1} << between(random, 1, 23));
  made.offset = between(random, 0, std::uint64_t{1} << between(random, 1, 45));
  if (support::one_in(random, 2)) made.offset -= made.offset % 4096;
  made.block = between(random, made.bytes / 500 + 1, std::uint64_t{1} << between(random, 15, 34));
  return made;
}

}  // namespace

TEST(a_padded_write_is_direct_to_its_end) {
  const Layout layout{true, 512, 512, 4096, true, false, true};
  const Piece body = next_piece(Op::Write, layout, 0x1000, 8192, 4196, 1 << 20, kStaging);
  CHECK(body.route == Route::InPlace && body.bytes == 4096, "the whole pages from where they are");
  const Piece tail = next_piece(Op::Write, layout, 0x2000, 12288, 100, 1 << 20, kStaging);
  CHECK(tail.route == Route::Staged && tail.bytes == 100 && tail.length == 4096, "the rest as a page");
}

TEST(pieces_tile_any_range_in_any_layout) {
  const unsigned long iterations = check::from_environment("NVME_OPS_TEST_ITERATIONS", 1000) * 5;
  for (unsigned long seed = 1; seed <= iterations; ++seed) {
    const check::Context context("seed " + std::to_string(seed));
    Random random(seed);
    check_tiles(random_case(random));
  }
}

TEST(blocks_beyond_32_bits_are_cut_to_what_one_call_moves) {
  const std::uint64_t bytes = std::uint64_t{9} << 30;
  for (const bool direct : {true, false}) {
    const Layout layout{direct, 512, 512, 4096, true};
    for (const Op op : {Op::Read, Op::Write}) {
      CHECK_EQUAL(next_piece(op, layout, 0x1000, 0, bytes, UINT64_MAX, kStaging).bytes, kMaxTransfer);
    }
  }
}

TEST(a_read_reaches_alignment_and_then_goes_in_place) {
  const Layout layout{true, 512, 512, 4096, true};
  const Piece head = next_piece(Op::Read, layout, 0x1000 + 100, 100, 1 << 20, 1 << 20, kStaging);
  CHECK(head.route == Route::Staged && head.bytes == 3996, "3996 bytes up to the page, got " << head.bytes);
  const Piece body = next_piece(Op::Read, layout, 0x2000, 4096, (1 << 20) - 3996, 1 << 20, kStaging);
  CHECK(body.route == Route::InPlace, "what follows in place");
  const Piece small = next_piece(Op::Read, layout, 0x1000 + 100, 100, 8192, 1 << 20, kStaging);
  CHECK(small.route == Route::Staged && small.bytes == 412, "412 bytes up to the sector, got " << small.bytes);
}
