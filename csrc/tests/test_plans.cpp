#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "both_processors.hpp"
#include "kvferry/errors.hpp"
#include "kvferry/plans.hpp"

using namespace kvferry;

namespace {

using List = std::vector<std::int64_t>;

struct Runs3 {
  List source, destination, count;
  bool operator==(const Runs3&) const = default;
};

Runs3 coalesced(const List& source, const List& destination) {
  const Marks breaks = find_breaks(source, destination);
  Runs3 runs{List(breaks.count), List(breaks.count), List(breaks.count)};
  write_runs(breaks, source, destination, runs.source.data(), runs.destination.data(), runs.count.data());
  return runs;
}

Runs3 one_by_one(const List& source, const List& destination) {
  Runs3 runs;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (i > 0 && source[i] - source[i - 1] == 1 && destination[i] - destination[i - 1] == 1) {
      ++runs.count.back();
    } else {
      runs.source.push_back(source[i]);
      runs.destination.push_back(destination[i]);
      runs.count.push_back(1);
    }
  }
  return runs;
}

}  // namespace

TEST_CASE("runs end where either side does, at every place of a word and of a vector") {
  on_both_processors([] {
    for (std::size_t size = 0; size <= 140; ++size) {
      List plain(size);
      for (std::size_t i = 0; i < size; ++i) {
        plain[i] = static_cast<std::int64_t>(i) + 1000;
      }
      REQUIRE(coalesced(plain, plain) == one_by_one(plain, plain));
      for (std::size_t at = 0; at < size; ++at) {
        List broken = plain;
        for (std::size_t i = at; i < size; ++i) {
          broken[i] += 9;
        }
        REQUIRE(coalesced(plain, broken) == one_by_one(plain, broken));
        REQUIRE(coalesced(broken, plain) == one_by_one(broken, plain));
      }
    }
  });
}

TEST_CASE("numbers at the ends of their range are no run and no undefined behaviour") {
  on_both_processors([] {
    constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    const List source = {kLeast, kMost, kLeast, 0, kMost, 0, 1}, destination = {0, 1, 2, kLeast, kMost, 8, 9};
    // most to least wraps around and counts as a step of one, as unsigned numbers do
    CHECK(coalesced(source, destination).count == List{1, 2, 1, 1, 2});
    CHECK_THROWS_AS(coalesced(source, List{1}), PageMismatch);
  });
}

TEST_CASE("the owner filter writes exactly what it has counted, whatever part is owned") {
  on_both_processors([] {
    std::mt19937 random(3);
    for (const unsigned owners : {1U, 2U, 3U, 8U, 40U}) {
      for (std::size_t size = 0; size < 700; size = size < 200 ? size + 1 : size + 61) {
        List pages(size);  // of exactly this size, so that a read beyond is seen
        std::vector<std::int8_t> of(size);
        List expected, positions;
        for (std::size_t i = 0; i < size; ++i) {
          pages[i] = static_cast<std::int64_t>(random());
          of[i] = static_cast<std::int8_t>(random() % owners);
          if (of[i] == 0) {
            expected.push_back(pages[i]);
            positions.push_back(static_cast<std::int64_t>(i) + 77);
          }
        }
        const Marks marks = find_owned(of, 0);
        REQUIRE(marks.count == expected.size());
        List owned(marks.count), at(marks.count);
        write_owned(marks, pages, 77, owned.data(), at.data());
        REQUIRE(owned == expected);
        REQUIRE(at == positions);
      }
    }
  });
}

TEST_CASE("a run that leaves a pool is named before anything is written") {
  const Term term{1000, 5000, 10, 8, 4};
  std::int64_t from = -1, to = -1, length = -1;
  const auto write = [&](std::int64_t source, std::int64_t destination, std::int64_t count) {
    return write_addresses({&term, 1}, List{source}, List{destination}, List{count}, &from, &to, &length);
  };
  CHECK(write(6, 0, 3)->page == 8);
  CHECK(write(0, 2, 3)->page == 4);
  CHECK(write(std::numeric_limits<std::int64_t>::max(), 0, 1)->pages == 8);
  CHECK(from == -1);
  CHECK(!write(5, 1, 3));
  CHECK(from == 1050);
  CHECK(to == 5010);
  CHECK(length == 30);
}
