#include <doctest/doctest.h>

#include <set>
#include <vector>

#include "kvferry/tree_node.hpp"

using namespace kvferry;

TEST_CASE("an id names a node for as long as it lives and no other one after that") {
  NodeStore store;
  std::set<std::int64_t> ids;
  std::vector<Node*> nodes;
  for (int i = 0; i < 1000; ++i) {  // over the border of several chunks
    nodes.push_back(store.create());
    ids.insert(nodes.back()->id());
  }
  CHECK(ids.size() == 1000);
  CHECK(store.size() == 1000);
  for (Node* node : nodes) {
    CHECK(store.find(node->id()) == node);  // nodes do not move when the store grows
    CHECK(node->id() > 0);
  }
  const std::int64_t stale = nodes[500]->id();
  store.destroy(nodes[500]);
  CHECK(store.find(stale) == nullptr);
  Node* next = store.create();
  CHECK(next == nodes[500]);  // the place is used again
  CHECK(next->id() != stale);
  CHECK(store.find(stale) == nullptr);
  CHECK(store.find(0) == nullptr);
  CHECK(store.find(-1) == nullptr);
  CHECK(store.find(std::int64_t{1} << 40) == nullptr);
}

TEST_CASE("a renamed node is found by its new id only") {
  NodeStore store;
  Node* node = store.create();
  const std::int64_t before = node->id();
  store.rename(node);
  CHECK(node->id() != before);
  CHECK(store.find(before) == nullptr);
  CHECK(store.find(node->id()) == node);
}

TEST_CASE("ids stay positive when the generation starts over") {
  NodeStore store;
  Node* node = store.create();
  node->generation = 0x7fffffff;
  store.rename(node);
  CHECK(node->id() > 0);
  CHECK((node->generation & 1) == 1);
  CHECK(store.find(node->id()) == node);
}

TEST_CASE("the table keeps equal hashes side by side and finds all of them after it has grown") {
  std::vector<Node> nodes(5000);
  NodeTable table;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].key = i / 5 * 0x9e3779b97f4a7c15;  // five of each
    table.add(&nodes[i]);
  }
  CHECK(table.size() == nodes.size());
  const auto found = [&](std::uint64_t key) {
    std::set<const Node*> same;
    for (const Node* node = table.bucket(key); node != nullptr; node = node->next_in_bucket) {
      if (node->key == key) {
        same.insert(node);
      }
    }
    return same;
  };
  for (const Node& node : nodes) {
    REQUIRE(found(node.key).size() == 5);
  }
  for (std::size_t i = 0; i < nodes.size(); i += 5) {
    table.remove(&nodes[i]);
    REQUIRE(found(nodes[i].key).size() == 4);
    REQUIRE(found(nodes[i].key).count(&nodes[i]) == 0);
  }
  CHECK(table.size() == nodes.size() / 5 * 4);
}
