#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kvferry/copies.hpp"
#include "kvferry/errors.hpp"
#include "streaming.hpp"

using namespace kvferry;

namespace {

constexpr std::byte kGuard{0xa5};

std::byte pattern(std::size_t i) { return static_cast<std::byte>(i * 37 + 11); }

}  // namespace

// The buffers have exactly the size that is used: a read or write beyond an end is seen by AddressSanitizer, a write
// into a neighbour by the guards.
TEST_CASE("streamed copies are exact at every alignment and size around their steps") {
  for (std::size_t from_offset = 0; from_offset < 64; from_offset += 7) {
    for (std::size_t to_offset = 0; to_offset < 64; to_offset += 5) {
      for (const std::size_t bytes : {1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 1000, 1024,
                                      1151, 1152, 1153, 4096, 4097}) {
        std::vector<std::byte> from(from_offset + bytes), to(to_offset + bytes + 1, kGuard);
        for (std::size_t i = 0; i < bytes; ++i) {
          from[from_offset + i] = pattern(i);
        }
        const std::byte* source = from.data() + from_offset;
        stream_copy(to.data() + to_offset, source, bytes, source);
        stream_fence();
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < to_offset; ++i) {
          wrong += to[i] != kGuard;
        }
        for (std::size_t i = 0; i < bytes; ++i) {
          wrong += to[to_offset + i] != pattern(i);
        }
        wrong += to.back() != kGuard;
        REQUIRE(wrong == 0);
      }
    }
  }
}

TEST_CASE("items that touch each other are copied by several threads without touching a neighbour") {
  const std::size_t item = 4099;  // no alignment at all
  const std::size_t pages = streaming_bytes() / item + 40;
  std::vector<std::byte> from(item * pages), to(item * pages, kGuard);
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[i] = pattern(i);
  }
  // all pages but every tenth, back to front
  std::vector<std::int64_t> list, into;
  for (std::size_t page = 0; page < pages; ++page) {
    if (page % 10 != 3) {
      list.push_back(static_cast<std::int64_t>(page));
      into.push_back(static_cast<std::int64_t>(pages - 1 - page));
    }
  }
  const Pool source{from.data(), 1, pages, item, item, item};
  const WritablePool destination{to.data(), 1, pages, item, item, item};
  copy_pages(source, list, destination, into, 3);
  std::size_t wrong = 0;
  for (std::size_t page = 0; page < pages; ++page) {
    for (std::size_t i = 0; i < item; ++i) {
      const std::byte expected = page % 10 == 3 ? kGuard : pattern(page * item + i);
      wrong += to[(pages - 1 - page) * item + i] != expected;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("nothing moves when a list is refused") {
  std::vector<std::byte> from(400, std::byte{1}), to(400, kGuard);
  const Pool source{from.data(), 1, 4, 100, 100, 100};
  const WritablePool destination{to.data(), 1, 4, 100, 100, 100};
  using List = std::vector<std::int64_t>;
  CHECK_THROWS_AS(copy_pages(source, List{0, 1}, destination, List{0}), PageMismatch);
  CHECK_THROWS_AS(copy_pages(source, List{0, 4}, destination, List{0, 1}), BadInput);
  CHECK_THROWS_AS(copy_pages(source, List{0, 1}, destination, List{0, -1}), BadInput);
  CHECK_THROWS_AS(copy_pages(source, List{0, 1}, destination, List{2, 2}), BadInput);
  CHECK(to == std::vector<std::byte>(400, kGuard));
}
