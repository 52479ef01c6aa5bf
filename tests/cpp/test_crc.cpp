// CRC-32 and CRC-32C: the published check values, and the folded one against the one by tables.
#include <string>

#include "base/crc.h"
#include "check.h"
#include "support.h"

using namespace nvme_ops;
using support::Bytes;

namespace {

std::uint32_t of(Crc kind, const std::string& text) {
  return checksum(kind, reinterpret_cast<const std::byte*>(text.data()), text.size());
}

constexpr Crc kBoth[] = {Crc::Crc32, Crc::Crc32c};

}  // namespace

// RFC 3720, B.4
TEST(vectors_of_iscsi) {
  CHECK_EQUAL(of(Crc::Crc32c, std::string(32, '\0')), 0x8A9136AAU);
  CHECK_EQUAL(of(Crc::Crc32c, std::string(32, '\xFF')), 0x62A8AB43U);
}

TEST(folding_and_tables_agree_on_any_length_and_address) {
  const Bytes data = support::pattern(3000, 7);
  for (const Crc kind : kBoth) {
    for (std::size_t start = 0; start < 17; ++start) {
      for (std::size_t bytes = 0; bytes < 700; bytes += bytes < 200 ? 1 : 37) {
        CHECK_EQUAL(checksum(kind, data.data() + start, bytes, 0x12345678),
                    plain_checksum(kind, data.data() + start, bytes, 0x12345678));
      }
    }
  }
}

TEST(a_checksum_goes_on_from_another) {
  const Bytes data = support::pattern(100000, 3);
  for (const Crc kind : kBoth) {
    const std::uint32_t whole = checksum(kind, data.data(), data.size());
    for (const std::size_t cut : {0UL, 1UL, 63UL, 64UL, 4096UL, 99999UL, 100000UL}) {
      const std::uint32_t first = checksum(kind, data.data(), cut);
      const std::uint32_t second = checksum(kind, data.data() + cut, data.size() - cut);
      CHECK_EQUAL(checksum(kind, data.data() + cut, data.size() - cut, first), whole);
      CHECK_EQUAL(joined(kind, first, second, data.size() - cut), whole);
    }
  }
}
