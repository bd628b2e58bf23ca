#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "both_processors.hpp"
#include "kvferry/errors.hpp"
#include "kvferry/hash.hpp"

using namespace kvferry;

namespace {

std::vector<std::int64_t> count_from(std::int64_t first, std::size_t count) {
  std::vector<std::int64_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::uint64_t hash_of(const std::vector<std::int64_t>& tokens) { return hash_run(Tokens(tokens), 0, tokens.size()); }

}  // namespace

// Other processes and later versions have to find the same numbers: a change of the hash is a change of a format.
TEST_CASE("page hashes have known values") {
  CHECK(hash_of({}) == 0xc0c863abd492b14f);
  CHECK(hash_of({0}) == 0xd52a48c9e2d78370);
  CHECK(hash_of({1}) == 0xbaaa1886a5166aac);
  CHECK(hash_of(count_from(1, 16)) == 0x4523c13bbad6a42f);
  CHECK(hash_of(count_from(1, 31)) == 0x82bb29a635f5d356);
  CHECK(hash_of(count_from(1000, 64)) == 0xea911d52b9496b5f);
  CHECK(chain(1, 2) == 0xd46a571de227cc9e);
  const std::optional<std::string> parts[] = {"fingerprint", std::nullopt, ""};
  CHECK(Namespace(parts, false).seed == 0x88ab4231ecfa975d);
}

TEST_CASE("both widths of a token list have one hash, wherever in the list it starts") {
  const auto wide = count_from(7, 200);
  const std::vector<std::int32_t> narrow_list(wide.begin(), wide.end());
  for (std::size_t at = 0; at < 40; ++at) {
    for (std::size_t count = 0; count <= 100; ++count) {
      REQUIRE(hash_run(Tokens(wide), at, count) == hash_run(Tokens(narrow_list), at, count));
    }
  }
}

TEST_CASE("the hash of a run depends on every token, on its place and on the length") {
  const auto tokens = count_from(1, 67);
  std::set<std::uint64_t> seen;
  for (std::size_t count = 0; count <= tokens.size(); ++count) {
    seen.insert(hash_run(Tokens(tokens), 0, count));
  }
  auto changed = tokens;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    changed[i] ^= 1 << 16;
    seen.insert(hash_of(changed));
    changed[i] = tokens[i];
  }
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    std::swap(changed[i - 1], changed[i]);
    seen.insert(hash_of(changed));
    std::swap(changed[i - 1], changed[i]);
  }
  CHECK(seen.size() == 68 + 67 + 66);
  CHECK(hash_of({0, 0}) != hash_of({0}));
  CHECK(chain(1, 2) != chain(2, 1));
}

TEST_CASE("no two lists of namespace parts have one key") {
  const auto key = [](std::optional<std::string> a, std::optional<std::string> b, bool bigrams = false) {
    const std::optional<std::string> parts[] = {std::move(a), std::move(b)};
    return Namespace(parts, bigrams).key;
  };
  const std::set<std::string> keys = {key("ab", "c"), key("a", "bc"),         key("abc", ""),        key("abc", std::nullopt),
                                      key("", "abc"), key(std::nullopt, "abc"), key("ab", "c", true)};
  CHECK(keys.size() == 7);
}

TEST_CASE("tokens are compared to the first difference, at every place of a block and for both widths") {
  on_both_processors([] {
    const auto tokens = count_from(5, 150);
    const std::vector<std::int32_t> stored(tokens.begin(), tokens.end());
    const std::vector<std::int32_t> same(tokens.begin(), tokens.end());
    for (std::size_t count = 0; count <= stored.size(); ++count) {
      REQUIRE(equal_run(stored.data(), Tokens(tokens), 0, count) == count);
      REQUIRE(equal_run(stored.data(), Tokens(same), 0, count) == count);
    }
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      auto wide = tokens;
      wide[i] += std::int64_t{1} << 32;  // equal in its lower half: does not fit, so it equals nothing
      REQUIRE(equal_run(stored.data(), Tokens(wide), 0, stored.size()) == i);
      auto narrow_list = same;
      narrow_list[i] ^= 1;
      REQUIRE(equal_run(stored.data(), Tokens(narrow_list), 0, stored.size()) == i);
    }
  });
}

TEST_CASE("the first token that does not fit is named") {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> out(3);
  const std::vector<std::int64_t> good = {0, 1, kMost}, large = {0, kMost + 1, -1}, negative = {0, 1, -1};
  CHECK(narrow(out.data(), Tokens(good), 0, 3) == 3);
  CHECK(out == std::vector<std::int32_t>{0, 1, static_cast<std::int32_t>(kMost)});
  CHECK(narrow(out.data(), Tokens(large), 0, 3) == 1);
  CHECK(narrow(out.data(), Tokens(negative), 1, 2) == 2);
  const std::vector<std::int32_t> small = {3, -1, 4};
  CHECK(narrow(out.data(), Tokens(small), 0, 3) == 1);
  CHECK(narrow(out.data(), Tokens(small), 2, 1) == 3);
}

TEST_CASE("page keys chain: a difference changes its page and all behind it, and a tail counts as a page") {
  const std::optional<std::string> parts[] = {"f"};
  for (const bool bigrams : {false, true}) {
    const Namespace space(parts, bigrams);
    auto tokens = count_from(1, 21);
    const auto before = page_keys(space, Tokens(tokens), 8);
    CHECK(before.size() == 3);
    tokens[9] += 1;
    const auto after = page_keys(space, Tokens(tokens), 8);
    CHECK(after[0] == before[0]);
    CHECK(after[1] != before[1]);
    CHECK(after[2] != before[2]);
    CHECK(page_keys(space, Tokens(std::span(tokens).first(bigrams ? 1 : 0)), 8).empty());
    CHECK_THROWS_AS(page_keys(space, Tokens(tokens), 0), BadInput);
  }
}
