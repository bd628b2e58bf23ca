#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

using namespace kvferry;

namespace {

constexpr std::size_t kPage = 4;
constexpr std::int64_t kPool = 120;
constexpr int kLanes = 3;

// A tree that requests with common beginnings run through; it evicts what a request needs.
struct Runner {
  Runner(const std::string& policy, int lanes)
      : tree({kPage, kPool, 0, lanes, 64, {policy, policy}}), lanes(lanes), free(kPool) {
    std::iota(free.begin(), free.end(), 0);
  }

  std::vector<std::int8_t> owners(std::size_t count) const {
    std::vector<std::int8_t> out(count);
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = static_cast<std::int8_t>(i / 2 % static_cast<std::size_t>(lanes));
    }
    return out;
  }

  void insert(const std::vector<std::int32_t>& prompt) {
    const std::size_t count = tree.pages_for(prompt.size());
    std::vector<std::int64_t> pages(free.end() - static_cast<std::ptrdiff_t>(count), free.end());
    free.resize(free.size() - count);
    const Tokens tokens{std::span<const std::int32_t>(prompt)};
    const auto before = tree.stats().l1_pages;
    const auto done = tree.insert(space, tokens, pages, owners(count), false);
    std::vector<std::uint8_t> back(count, 0);
    for (std::int64_t position : done.duplicates) {
      back[static_cast<std::size_t>(position)] = 1;
      free.push_back(pages[static_cast<std::size_t>(position)]);
    }
    REQUIRE(tree.stats().l1_pages - before == std::count(back.begin(), back.end(), 0));
  }

  Namespace make_space() const {
    const std::optional<std::string> parts[] = {std::string("victims")};
    return Namespace(parts, false);
  }

  PrefixTree tree;
  int lanes;
  Namespace space = make_space();
  std::vector<std::int64_t> free;
};

// Whole pages, few beginnings: nodes share, split and hang below each other.
std::vector<std::int32_t> prompt_of(std::minstd_rand& chance) {
  std::vector<std::int32_t> prompt;
  for (std::size_t pages = 1 + chance() % 8; pages-- > 0;) {
    prompt.insert(prompt.end(), kPage, static_cast<std::int32_t>(chance() % 3));
  }
  return prompt;
}

}  // namespace

TEST_CASE("what is named is what goes, in that order, and naming it changes nothing") {
  for (std::string_view policy : kPolicies) {
    for (int lanes : {1, kLanes}) {
      // the second tree is never asked
      Runner asked(std::string(policy), lanes), twin(std::string(policy), lanes);
      std::minstd_rand chance(11);
      std::size_t rounds = 0;
      for (int step = 0; step < 3000; ++step) {
        const auto prompt = prompt_of(chance);
        const Tokens tokens{std::span<const std::int32_t>(prompt)};
        for (Runner* runner : {&asked, &twin}) {
          runner->tree.match(runner->space, tokens, {});
        }
        if (chance() % 3 == 0) {  // and nothing is evicted, so that what follows would tell
          asked.tree.victims(Tier::l1, std::vector<std::int64_t>(static_cast<std::size_t>(lanes), chance() % 30));
        }
        if (asked.free.size() >= 12) {
          asked.insert(prompt);
          twin.insert(prompt);
          continue;
        }
        std::vector<std::int64_t> wanted(static_cast<std::size_t>(lanes));
        for (auto& pages : wanted) {
          pages = static_cast<std::int64_t>(chance() % 30);
        }
        const auto named = asked.tree.victims(Tier::l1, wanted);
        asked.tree.check_integrity();
        REQUIRE(asked.tree.victims(Tier::l1, wanted) == named);
        std::map<std::int64_t, std::size_t> place;
        for (std::size_t i = 0; i < named.size(); ++i) {
          for (std::int64_t page : asked.tree.node(named[i]).l1_pages) {
            place[page] = i;
          }
        }
        const auto gone = asked.tree.evict_owners(Tier::l1, wanted);
        std::vector<std::size_t> order;
        for (std::int64_t page : gone) {
          const auto found = place.find(page);
          REQUIRE(found != place.end());
          if (std::find(order.begin(), order.end(), found->second) == order.end()) {
            order.push_back(found->second);
          }
        }
        REQUIRE(std::is_sorted(order.begin(), order.end()));
        REQUIRE(order.size() == named.size());
        REQUIRE(twin.tree.evict_owners(Tier::l1, wanted) == gone);
        asked.free.insert(asked.free.end(), gone.begin(), gone.end());
        twin.free.insert(twin.free.end(), gone.begin(), gone.end());
        rounds += !gone.empty();
      }
      CHECK(rounds > 50);
    }
  }
}

TEST_CASE("a demand for other lanes than there are, or for less than nothing, is refused") {
  Runner runner("lhd", kLanes);
  const std::vector<std::int64_t> few = {1}, below = {0, -1, 0};
  CHECK_THROWS_AS(runner.tree.victims(Tier::l1, few), BadInput);
  CHECK_THROWS_AS(runner.tree.victims(Tier::l1, below), BadInput);
}
