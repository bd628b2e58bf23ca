// Which node of a tier goes next: one interface, the policies behind it differ in what they order by.
//
// The tree offers a node while it may go now: it holds pages of the tier, nothing below it does, nobody holds it.
// So children before parents and never a pinned or pending page are the tree's business, the order is the policy's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvferry/reuse.hpp"
#include "kvferry/tree_node.hpp"

namespace kvferry {

class Policy {
 public:
  Policy(Tier tier, std::size_t groups) : tier_(tier), groups_(groups) {}
  virtual ~Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  virtual void entered(Node*) {}  // it has pages of the tier from now on
  void used(Node* node);          // its `use` has changed
  void offer(Node* node);
  void withdraw(Node* node);
  virtual Node* victim() = 0;  // the next to go of those offered; null: there is none
  // Between the two, victim() and whoever withdraws and offers only try out; recall() takes back what victim() moved.
  virtual void rehearse() {}
  virtual void recall() {}
  // The same order for nodes that are compared one by one, offered or not: the smaller goes first.
  virtual std::pair<std::int64_t, std::uint64_t> rank(const Node* node) const = 0;

  std::size_t size() const;
  void check() const;  // IntegrityError
  template <typename Visit>
  void each(Visit&& visit) const {
    for (const Group& group : groups_) {
      for (const Entry& entry : group.nodes) {
        visit(entry.node);
      }
    }
  }

 protected:
  struct Place {
    std::uint8_t group;
    std::uint64_t order;
  };
  struct Entry {
    std::uint64_t order;
    std::uint32_t slot;  // of the node: equal orders are told apart
    Node* node;
    bool operator<(const Entry& other) const {
      return order != other.order ? order < other.order : slot < other.slot;
    }
  };
  struct Group {
    std::set<Entry> nodes;
    std::int64_t pages = 0;
    Node* first() const { return nodes.empty() ? nullptr : nodes.begin()->node; }
  };

  virtual Place place(const Node* node) const = 0;
  virtual void offered(const Node*) {}
  Node::Standing& standing(Node* node) const { return node->standing[at(tier_)]; }
  const Node::Standing& standing(const Node* node) const { return node->standing[at(tier_)]; }

  Tier tier_;
  std::vector<Group> groups_;
};

// The names that make_policy takes; lhd is the default (docs/decisions.md has its figures).
inline constexpr std::array<std::string_view, 4> kPolicies = {"lru", "slru", "s3fifo", "lhd"};

// BadInput for another name.
void require_policy(std::string_view name);
// Whether it asks how often a prompt came that has been evicted since.
bool learns(std::string_view name);
// `history` is needed by those that learn, and outlives the policy.
std::unique_ptr<Policy> make_policy(std::string_view name, Tier tier, const Clock& clock, ReuseHistory* history);

}  // namespace kvferry
