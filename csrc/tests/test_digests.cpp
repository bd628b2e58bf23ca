#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "kvferry/digests.hpp"
#include "kvferry/errors.hpp"

using namespace kvferry;

namespace {

using List = std::vector<std::int64_t>;

// The bytes that xxHash's own self-test uses.
std::vector<std::byte> test_bytes(std::size_t size) {
  std::vector<std::byte> bytes(size);
  std::uint64_t generator = 2654435761U;
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(generator >> 56);
    generator *= 11400714785074694797ULL;
  }
  return bytes;
}

std::uint64_t digest_of(const std::vector<std::byte>& bytes) {
  std::uint64_t digest = 0;
  digest_items(Pool{bytes.data(), 1, 1, bytes.size(), 0, 0}, List{0}, List{0}, &digest);
  return digest;
}

}  // namespace

// From the self-test of xxHash (cli/xsum_sanity_check.c), for each of the ways that it treats a length.
TEST_CASE("digests are those of xxh3") {
  CHECK(digest_of(test_bytes(1)) == 0xC44BDFF4074EECDBULL);
  CHECK(digest_of(test_bytes(6)) == 0x27B56A84CD2D7325ULL);
  CHECK(digest_of(test_bytes(12)) == 0xA713DAF0DFBB77E7ULL);
  CHECK(digest_of(test_bytes(24)) == 0xA3FE70BF9D3510EBULL);
  CHECK(digest_of(test_bytes(48)) == 0x397DA259ECBA1F11ULL);
  CHECK(digest_of(test_bytes(80)) == 0xBCDEFBBB2C47C90AULL);
  CHECK(digest_of(test_bytes(195)) == 0xCD94217EE362EC3AULL);
  CHECK(digest_of(test_bytes(403)) == 0xCDEB804D65C6DEA4ULL);
  CHECK(digest_of(test_bytes(512)) == 0x617E49599013CB6BULL);
  CHECK(digest_of(test_bytes(2048)) == 0xDD59E2C3A5F038E0ULL);
  CHECK(digest_of(test_bytes(2240)) == 0x6E73A90539CF2948ULL);
  CHECK(digest_of(test_bytes(2367)) == 0xCB37AEB9E5D361EDULL);
}

// Items end where the buffer ends, at odd addresses: AddressSanitizer sees a read beyond.
TEST_CASE("items of any size at any address are read exactly, by any number of threads") {
  const std::size_t sizes[] = {1, 2, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 4097};
  for (const std::size_t item : sizes) {
    const std::size_t layers = 3, pages = 5;
    std::vector<std::byte> bytes = test_bytes(1 + layers * pages * item);
    const Pool pool{bytes.data() + 1, layers, pages, item, pages * item, item};
    List of_layers, of_pages;
    std::vector<std::uint64_t> expected;
    for (std::size_t i = 0; i < layers * pages; ++i) {
      const std::size_t layer = i % layers, page = (i * 2 + 4) % pages;
      of_layers.push_back(static_cast<std::int64_t>(layer));
      of_pages.push_back(static_cast<std::int64_t>(page));
      const std::byte* at = pool.base + (layer * pages + page) * item;
      expected.push_back(digest_of(std::vector<std::byte>(at, at + item)));
    }
    for (const unsigned threads : {0U, 1U, 3U, 20U}) {
      std::vector<std::uint64_t> digests(of_pages.size());
      digest_items(pool, of_layers, of_pages, digests.data(), threads);
      REQUIRE(digests == expected);
    }
  }
}

TEST_CASE("a foreign layer or page is refused before anything is read") {
  const Pool pool{nullptr, 2, 3, 1000, 3000, 1000};  // would end the process when read
  std::uint64_t digests[2] = {};
  CHECK_THROWS_WITH_AS(digest_items(pool, List{0, 2}, List{0, 0}, digests), "layer 2 is not of this pool of 2",
                       BadInput);
  CHECK_THROWS_WITH_AS(digest_items(pool, List{0, -1}, List{0, 0}, digests), "layer -1 is not of this pool of 2",
                       BadInput);
  CHECK_THROWS_WITH_AS(digest_items(pool, List{0, 1}, List{0, 3}, digests), "page 3 is not of this pool of 3",
                       BadInput);
  CHECK_THROWS_WITH_AS(digest_items(pool, List{0}, List{0, 1}, digests), "1 layers are given for 2 pages",
                       PageMismatch);
  digest_items(pool, List{}, List{}, digests);
}
