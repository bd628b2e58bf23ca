#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kvferry/errors.hpp"
#include "kvferry/extents.hpp"
#include "page_runs.hpp"

using namespace kvferry;

namespace {

std::vector<Page> pages_of(std::span<const Run> runs) {
  std::vector<Page> pages;
  for (const Run& run : runs) {
    for (std::uint32_t i = 0; i < run.count; ++i) {
      pages.push_back(run.first + i);
    }
  }
  return pages;
}

std::string integrity_error(const PageExtents& extents) {
  try {
    extents.check_integrity();
  } catch (const IntegrityError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("stale edge lengths inside an extent are never read") {
  // every second page comes back first, so that each later one joins two extents and leaves old lengths inside
  PageExtents extents(64, 1, "pool");
  Runs runs;
  REQUIRE(extents.allocate(0, 64, runs));
  for (Page page = 0; page < 64; page += 2) {
    extents.release(std::vector<Page>{page});
  }
  extents.check_integrity();
  CHECK(extents.extents() == 32);
  for (Page page = 63; page > 0; page -= 2) {
    extents.release(std::vector<Page>{page});
    extents.check_integrity();
  }
  CHECK(extents.extents() == 1);
  CHECK(extents.largest_extent() == 64);
  // cut it again where the stale lengths are
  for (int i = 0; i < 9; ++i) {
    REQUIRE(extents.allocate(0, 7, runs));
    extents.check_integrity();
  }
  CHECK(extents.free_pages() == 1);
}

TEST_CASE("an extent never crosses the border of a lane, also when a run that comes back does") {
  PageExtents extents(8, 3, "set of lanes");
  Runs runs;
  for (std::size_t lane = 0; lane < 3; ++lane) {
    REQUIRE(extents.allocate(lane, 8, runs));
  }
  const Page first[] = {6}, count[] = {12};  // the end of lane 0, all of lane 1, the start of lane 2
  extents.release_runs(first, count);
  extents.check_integrity();
  CHECK(extents.free_pages(0) == 2);
  CHECK(extents.free_pages(1) == 8);
  CHECK(extents.free_pages(2) == 2);
  CHECK(extents.extents() == 3);
  // both neighbours over a border free already: the one below, then the one above
  const Page rest_first[] = {18, 0}, rest_count[] = {6, 6};
  extents.release_runs(rest_first, rest_count);
  extents.check_integrity();
  CHECK(extents.extents() == 3);
  REQUIRE(extents.allocate(0, 8, runs));
  extents.release(pages_of(runs));
  extents.check_integrity();
  CHECK(extents.largest_extent(0) == 8);
  CHECK(extents.free_pages() == 24);
}

TEST_CASE("a release that is refused leaves every state as it was") {
  PageExtents extents(40, 1, "pool");
  Runs runs;
  REQUIRE(extents.allocate(0, 30, runs));
  Runs held;
  REQUIRE(extents.allocate(0, 5, held));
  extents.reserve(3, held);
  const std::vector<std::uint8_t> before(extents.states().begin(), extents.states().end());
  const std::vector<std::vector<Page>> lists = {{0, 1, 2, 1}, {5, 39}, {5, -1}, {5, 40}, {4, 31},
                                                {29, 28, 27, 29}};
  for (const std::vector<Page>& pages : lists) {
    CHECK_THROWS_AS(extents.release(pages), BadInput);
    CHECK(std::equal(before.begin(), before.end(), extents.states().begin()));
    extents.check_integrity();
  }
  CHECK(extents.roll_back(3) == 5);
  extents.release(pages_of(runs));
  extents.check_integrity();
  CHECK(extents.extents() == 1);
}

TEST_CASE("a contradiction is found, wherever it is") {
  PageExtents extents(16, 1, "pool");
  Runs runs;
  REQUIRE(extents.allocate(0, 4, runs));
  REQUIRE(integrity_error(extents).empty());
  extents.states()[9] = PageExtents::kTaken;
  CHECK(integrity_error(extents).find("the state of page 9 is another") != std::string::npos);
  extents.states()[9] = PageExtents::kFree;
  extents.states()[2] = PageExtents::kFree;  // would be handed out by nobody and freed by nobody
  CHECK(integrity_error(extents).find("the state of page 2 is another") != std::string::npos);
  extents.states()[2] = PageExtents::kReserved;  // held by nobody
  CHECK(integrity_error(extents).find("the state of page 2 is another") != std::string::npos);
  extents.states()[2] = PageExtents::kTaken;
  CHECK(integrity_error(extents).empty());
}

TEST_CASE("random work keeps the structure whole at every step") {
  std::mt19937 random(5);
  PageExtents extents(400, 1, "pool");
  std::vector<std::vector<Page>> held;
  Runs runs;
  for (int step = 0; step < 3000; ++step) {
    if (random() % 2 == 0) {
      const auto count = static_cast<std::int64_t>(random() % 30 + 1);
      const std::int64_t before = extents.free_pages();
      const bool had = extents.allocate(0, count, runs);
      REQUIRE(had == (count <= before));
      if (had) {
        held.push_back(pages_of(runs));
        std::shuffle(held.back().begin(), held.back().end(), random);
      }
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      extents.release(held.back());
      held.pop_back();
    }
    extents.check_integrity();
  }
  for (const auto& pages : held) {
    extents.release(pages);
  }
  CHECK(extents.extents() == 1);
}

TEST_CASE("page lists become runs at every length around the vector width") {
  for (std::int64_t length = 0; length < 70; ++length) {
    for (std::int64_t gap = 0; gap <= length; ++gap) {
      std::vector<Page> pages;
      for (std::int64_t i = 0; i < length; ++i) {
        pages.push_back(100 + i + (i >= gap ? 5 : 0));
      }
      Runs runs;
      REQUIRE(to_runs(pages, 200, runs));
      REQUIRE(pages_of(runs) == pages);
      REQUIRE(runs.size() == (length == 0 ? 0 : gap == 0 || gap == length ? 1 : 2));
      REQUIRE(total(runs) == length);
      if (length > 0) {
        REQUIRE(!to_runs(pages, pages.back(), runs));
      }
    }
  }
}
