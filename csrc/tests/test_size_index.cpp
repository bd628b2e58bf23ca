#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "kvferry/size_index.hpp"

using kvferry::SizeIndex;

namespace {

std::vector<std::uint64_t> keys_of(const SizeIndex& index) {
  std::vector<std::uint64_t> keys;
  index.each([&](std::uint64_t key) { keys.push_back(key); });
  return keys;
}

void require_equal(const SizeIndex& index, const std::set<std::uint64_t>& model) {
  REQUIRE(index.size() == model.size());
  REQUIRE(keys_of(index) == std::vector<std::uint64_t>(model.begin(), model.end()));
  if (!model.empty()) {
    REQUIRE(index.greatest() == *model.rbegin());
  }
}

}  // namespace

TEST_CASE("an empty index finds, erases and visits nothing") {
  SizeIndex index;
  CHECK(index.empty());
  CHECK(!index.at_least(0));
  CHECK(!index.erase(1));
  CHECK(keys_of(index).empty());
}

TEST_CASE("a key is a length and a first page, ordered by length") {
  const auto key = SizeIndex::key(7, 0xffffffff);
  CHECK(SizeIndex::length(key) == 7);
  CHECK(SizeIndex::first(key) == 0xffffffff);
  CHECK(key < SizeIndex::key(8, 0));
}

TEST_CASE("blocks split and join without losing a key, in any order of growth") {
  std::vector<std::uint64_t> keys;
  for (std::uint32_t i = 0; i < 2000; ++i) {
    keys.push_back(SizeIndex::key(i % 17 + 1, i));
  }
  std::mt19937 random(7);
  for (int order = 0; order < 3; ++order) {
    if (order == 0) {
      std::sort(keys.begin(), keys.end());
    } else if (order == 1) {
      std::sort(keys.rbegin(), keys.rend());
    } else {
      std::shuffle(keys.begin(), keys.end(), random);
    }
    SizeIndex index;
    std::set<std::uint64_t> model;
    for (const std::uint64_t key : keys) {
      index.insert(key);
      model.insert(key);
    }
    require_equal(index, model);
    std::vector<std::uint64_t> leaving = keys;
    std::shuffle(leaving.begin(), leaving.end(), random);
    for (std::size_t i = 0; i < leaving.size(); ++i) {
      REQUIRE(index.erase(leaving[i]));
      REQUIRE(!index.erase(leaving[i]));
      model.erase(leaving[i]);
      if (i % 97 == 0) {
        require_equal(index, model);
      }
    }
    CHECK(index.empty());
  }
}

TEST_CASE("the smallest key that is not less is found over the borders of blocks") {
  std::mt19937 random(11);
  SizeIndex index;
  std::set<std::uint64_t> model;
  for (int i = 0; i < 6000; ++i) {
    const std::uint64_t key = SizeIndex::key(random() % 50, random() % 400);
    if (random() % 3 != 0) {
      if (model.insert(key).second) {
        index.insert(key);
      }
    } else {
      REQUIRE(index.erase(key) == (model.erase(key) == 1));
    }
    const std::uint64_t wanted = SizeIndex::key(random() % 51, random() % 400);
    const auto expected = model.lower_bound(wanted);
    const auto found = index.at_least(wanted);
    REQUIRE(found.has_value() == (expected != model.end()));
    if (found) {
      REQUIRE(*found == *expected);
    }
  }
  require_equal(index, model);
}

TEST_CASE("an index that has moved keeps its keys") {
  SizeIndex index;
  std::set<std::uint64_t> model;
  for (std::uint32_t i = 0; i < 1000; ++i) {
    index.insert(SizeIndex::key(i * 7 % 1000 + 1, i));
    model.insert(SizeIndex::key(i * 7 % 1000 + 1, i));
  }
  SizeIndex moved(std::move(index));
  require_equal(moved, model);
  SizeIndex assigned;
  assigned.insert(1);
  assigned = std::move(moved);
  require_equal(assigned, model);
  assigned.insert(SizeIndex::key(5000, 1));
  CHECK(assigned.greatest() == SizeIndex::key(5000, 1));
}
