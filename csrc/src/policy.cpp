#include "kvferry/policy.hpp"

#include <algorithm>

#include "kvferry/errors.hpp"

namespace kvferry {

void Policy::offer(Node* node) {
  Node::Standing& s = standing(node);
  const Place where = place(node);
  s.group = where.group;
  s.order = where.order;
  s.offered = true;
  s.pages = static_cast<std::int64_t>(node->pages[at(tier_)].size());
  groups_[s.group].nodes.insert({s.order, node->slot, node});
  groups_[s.group].pages += s.pages;
  offered(node);
}

void Policy::withdraw(Node* node) {
  Node::Standing& s = standing(node);
  groups_[s.group].nodes.erase({s.order, node->slot, node});
  groups_[s.group].pages -= s.pages;
  s.offered = false;
}

void Policy::used(Node* node) {
  Node::Standing& s = standing(node);
  if (!s.offered) {
    return;
  }
  const Place where = place(node);
  if (where.group != s.group || where.order != s.order) {
    withdraw(node);
    offer(node);
  }
}

std::size_t Policy::size() const {
  std::size_t nodes = 0;
  for (const Group& group : groups_) {
    nodes += group.nodes.size();
  }
  return nodes;
}

void Policy::check() const {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    std::int64_t pages = 0;
    for (const Entry& entry : groups_[i].nodes) {
      const Node::Standing& s = standing(entry.node);
      const Place where = place(entry.node);
      pages += s.pages;
      if (!s.offered || s.group != i || s.order != entry.order || where.group != i || where.order != entry.order ||
          s.pages != static_cast<std::int64_t>(entry.node->pages[at(tier_)].size())) {
        throw IntegrityError("eviction order of L" + std::to_string(at(tier_) + 1) + ": node " +
                             std::to_string(entry.node->id()) + " stands at " + std::to_string(entry.order) +
                             " of group " + std::to_string(i) + ", belongs to " + std::to_string(where.order) +
                             " of group " + std::to_string(where.group));
      }
    }
    if (pages != groups_[i].pages) {
      throw IntegrityError("eviction order of L" + std::to_string(at(tier_) + 1) + ": " + std::to_string(pages) +
                           " pages in group " + std::to_string(i) + ", counted " + std::to_string(groups_[i].pages));
    }
  }
}

}  // namespace kvferry
