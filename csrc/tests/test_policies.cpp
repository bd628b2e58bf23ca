#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "kvferry/errors.hpp"
#include "kvferry/policy.hpp"

using namespace kvferry;

namespace {

// Nodes that come, are used and go, without a tree around them.
struct Crowd {
  explicit Crowd(std::string_view name)
      : history(clock, 512, 2000), policy(make_policy(name, Tier::l1, clock, &history)), nodes(300) {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      nodes[i].slot = static_cast<std::uint32_t>(i + 1);
    }
  }

  void arrive(Node& node, std::size_t pages) {
    node.pages[at(Tier::l1)].assign(pages, 1);
    node.use = {clock.now, history.use(node.slot)};
    policy->entered(&node);
    policy->offer(&node);
  }
  void use(Node& node) {
    history.use(node.slot);
    node.use = {clock.now, node.use.uses + 1};
    policy->used(&node);
  }
  void go(Node& node) {
    policy->withdraw(&node);
    node.pages[at(Tier::l1)].clear();
  }
  bool here(const Node& node) const { return node.has(Tier::l1); }

  Clock clock;
  ReuseHistory history;
  std::unique_ptr<Policy> policy;
  std::vector<Node> nodes;
};

}  // namespace

TEST_CASE("the next to go is the one that is first in the order of all, whatever happened before") {
  for (std::string_view name : kPolicies) {
    Crowd crowd(name);
    std::minstd_rand chance(5);
    std::size_t here = 0, checked = 0;
    for (int step = 0; step < 20'000; ++step) {
      crowd.clock.now += chance() % 3;
      crowd.history.tick();
      Node& node = crowd.nodes[chance() % crowd.nodes.size()];
      if (here > 60) {
        Node* victim = crowd.policy->victim();
        REQUIRE(victim != nullptr);
        REQUIRE(victim == crowd.policy->victim());  // asking changes nothing
        auto first = crowd.policy->rank(victim);
        std::size_t before = 0;
        crowd.policy->each([&](const Node* other) { before += crowd.policy->rank(other) < first; });
        if (name == "lru" || name == "lhd") {  // the shares of the others decide between two orders
          REQUIRE(before == 0);
          ++checked;
        }
        crowd.go(*victim);
        --here;
      } else if (crowd.here(node)) {
        crowd.use(node);
      } else {
        crowd.arrive(node, 1 + chance() % 5);
        ++here;
      }
      if (step % 500 == 0) {
        crowd.policy->check();
        crowd.history.check();
        REQUIRE(crowd.policy->size() == here);
      }
    }
    CHECK((checked > 1000 || (name != "lru" && name != "lhd")));
    while (Node* victim = crowd.policy->victim()) {
      crowd.go(*victim);
      --here;
    }
    CHECK(here == 0);
    CHECK(crowd.policy->size() == 0);
  }
}

TEST_CASE("an unknown name is refused") {
  const Clock clock;
  CHECK_THROWS_AS(make_policy("mru", Tier::l1, clock, nullptr), BadInput);
}

TEST_CASE("an order that has lost a node says so") {
  Crowd crowd("lru");
  crowd.arrive(crowd.nodes[0], 2);
  crowd.policy->check();
  crowd.nodes[0].use.last = 7;  // behind its back
  CHECK_THROWS_AS(crowd.policy->check(), IntegrityError);
}
