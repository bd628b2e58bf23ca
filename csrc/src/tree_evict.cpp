// Eviction in the order of the tier's policy, children before parents, never a held node.
#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry {

// What is still missing: a number of pages, or one for each lane.
struct PrefixTree::Demand {
  std::int64_t pages = 0;
  std::vector<std::int64_t> lanes;  // empty: any lane will do

  bool met() const {
    return lanes.empty() ? pages <= 0 : std::all_of(lanes.begin(), lanes.end(), [](auto n) { return n <= 0; });
  }
  bool wants(std::int8_t owner) const { return lanes.empty() || lanes[static_cast<std::size_t>(owner)] > 0; }
  bool wants(const Node* node) const {
    return std::any_of(node->owners.begin(), node->owners.end(), [this](auto o) { return wants(o); });
  }
  void receive(std::int8_t owner) {
    --pages;
    if (!lanes.empty()) {
      --lanes[static_cast<std::size_t>(owner)];
    }
  }
};

// How many leading pages of the node can stay: those behind them meet the demand, or these are of no use to it.
std::size_t PrefixTree::surplus(const Node* node, const Demand& demand) const {
  const std::size_t count = node->owners.size();
  if (demand.lanes.empty()) {
    return count - std::min(count, static_cast<std::size_t>(std::max<std::int64_t>(demand.pages, 0)));
  }
  Demand left = demand;
  std::size_t keep = count;
  for (std::size_t i = count; i-- > 0 && !left.met();) {
    keep = left.wants(node->owners[i]) ? i : keep;
    left.receive(node->owners[i]);
  }
  return keep;
}

// Takes the pages of one tier from page `keep` on. Where nothing else is left of them the node gets shorter
// (under a new id: whoever remembers the old one has to match again), or goes.
void PrefixTree::drop(Node* node, Tier tier, std::size_t keep, std::vector<std::int64_t>& out) {
  const Event event = tier == Tier::l1 ? Event::drop_l1 : Event::drop_l2;
  if (keep > 0 && (after(node->state, event) != Residency::absent || node->first_child != nullptr)) {
    cut(node, keep);
    keep = 0;
  }
  if (keep == 0) {
    const auto pages = take(node, tier);
    out.insert(out.end(), pages.begin(), pages.end());
    node->state = after(node->state, event);
    prune(node);
    return;
  }
  withdraw(node, tier);
  auto& pages = node->pages[at(tier)];
  const auto first = pages.begin() + static_cast<std::ptrdiff_t>(keep);
  const auto count = static_cast<std::int64_t>(pages.end() - first);
  for (auto page = first; page != pages.end(); ++page) {
    used_[at(tier)][static_cast<std::size_t>(*page)] = 0;
  }
  out.insert(out.end(), first, pages.end());
  held_pages_[at(tier)] -= count;
  pages.resize(keep);
  node->owners.resize(keep);
  node->chains.resize(keep);
  node->chain_end = node->chains.back();
  node->length = keep * shape_.page_size;
  node->tokens.resize(node->length + node->lookahead);
  pages.shrink_to_fit();
  node->tokens.shrink_to_fit();
  store_.rename(node);
  settle(node, tier);
}

// The order of an eviction: go(node, keep) takes the pages of a node from `keep` on out of the tier.
template <typename Go>
void PrefixTree::choose(Tier tier, Demand demand, Go&& go) {
  Policy& policy = *policies_[at(tier)];
  const auto take_from = [&](Node* node, std::size_t keep) {
    for (std::size_t i = keep; i < node->owners.size(); ++i) {
      demand.receive(node->owners[i]);
    }
    go(node, keep);
  };
  if (demand.lanes.empty()) {
    while (!demand.met()) {
      Node* node = policy.victim();
      if (node == nullptr) {
        break;
      }
      take_from(node, surplus(node, demand));
    }
    return;
  }
  const auto evict_node = [&](Node* node) {
    const std::size_t keep = surplus(node, demand);
    if (keep < node->owners.size()) {
      take_from(node, keep);
    }
  };
  using Turn = std::tuple<std::pair<std::int64_t, std::uint64_t>, std::uint32_t, Node*>;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<>> turns;
  const auto queue_up = [&](Node* node) { turns.emplace(policy.rank(node), node->slot, node); };
  // first what costs nobody else: nodes that hold pages of these lanes and have no child in the tier
  policy.each([&](Node* node) {
    if (demand.wants(node)) {
      queue_up(node);
    }
  });
  while (!turns.empty() && !demand.met()) {
    Node* node = std::get<Node*>(turns.top());
    Node* parent = node->parent;
    turns.pop();
    evict_node(node);
    if (parent->standing[at(tier)].offered && demand.wants(parent)) {
      queue_up(parent);
    }
  }
  // then nodes that stand on such pages, in the order of what is below them, with all of it
  turns = {};
  if (!demand.met()) {
    policy.each(queue_up);
  }
  while (!turns.empty() && !demand.met()) {
    Node* node = std::get<Node*>(turns.top());  // gone meanwhile: it has no pages then
    turns.pop();
    while (node->holds == 0 && node->has(tier) && !demand.wants(node)) {
      node = node->parent;
    }
    if (node->holds > 0 || !node->has(tier)) {
      continue;
    }
    std::vector<Node*> below{node};
    for (std::size_t i = 0; i < below.size(); ++i) {
      for (Node* child = below[i]->first_child; child != nullptr; child = child->next_sibling) {
        if (child->has(tier)) {
          below.push_back(child);
        }
      }
    }
    for (std::size_t i = below.size(); i-- > 1;) {
      take_from(below[i], 0);
    }
    Node* parent = node->parent;
    if (!demand.met()) {
      evict_node(node);
    }
    if (parent->standing[at(tier)].offered) {
      queue_up(parent);
    }
  }
}

PrefixTree::Demand PrefixTree::demand_of(std::span<const std::int64_t> wanted) const {
  if (wanted.size() != static_cast<std::size_t>(shape_.lanes)) {
    throw BadInput(std::to_string(wanted.size()) + " numbers for " + std::to_string(shape_.lanes) + " lanes");
  }
  for (std::int64_t pages : wanted) {
    if (pages < 0) {
      throw BadInput("cannot evict " + std::to_string(pages) + " pages of a lane");
    }
  }
  Demand demand;
  if (shape_.lanes == 1) {
    demand.pages = wanted.front();
  } else {
    demand.lanes.assign(wanted.begin(), wanted.end());
  }
  return demand;
}

std::vector<std::int64_t> PrefixTree::evict(Tier tier, std::int64_t pages) {
  if (pages < 0) {
    throw BadInput("cannot evict " + std::to_string(pages) + " pages");
  }
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(std::min(pages, evictable_pages_[at(tier)])));
  Demand demand;
  demand.pages = pages;
  choose(tier, std::move(demand), [&](Node* node, std::size_t keep) { drop(node, tier, keep, out); });
  return out;
}

std::vector<std::int64_t> PrefixTree::evict_owners(Tier tier, std::span<const std::int64_t> wanted) {
  std::vector<std::int64_t> out;
  choose(tier, demand_of(wanted), [&](Node* node, std::size_t keep) { drop(node, tier, keep, out); });
  return out;
}

// A rehearsal: what an eviction would drop is set aside, so that the order goes on behind it, and put back.
std::vector<std::int64_t> PrefixTree::victims(Tier tier, std::span<const std::int64_t> wanted) {
  struct Aside {
    Node* node;
    std::vector<std::int64_t> pages;
    std::vector<std::int8_t> owners;  // of a node that loses a part
  };
  Demand demand = demand_of(wanted);
  std::vector<std::int64_t> out;
  std::vector<Aside> aside;
  std::unordered_set<const Node*> seen;
  Policy& policy = *policies_[at(tier)];
  policy.rehearse();
  choose(tier, std::move(demand), [&](Node* node, std::size_t keep) {
    if (seen.insert(node).second) {
      out.push_back(node->id());
    }
    withdraw(node, tier);
    auto& pages = node->pages[at(tier)];
    if (keep > 0) {
      aside.push_back({node, pages, node->owners});
      pages.resize(keep);
      node->owners.resize(keep);
      settle(node, tier);
      return;
    }
    aside.push_back({node, std::move(pages), {}});
    pages.clear();
    settle(node, tier);
    --node->parent->children_with[at(tier)];
    settle(node->parent, tier);
  });
  policy.recall();
  for (; !aside.empty(); aside.pop_back()) {
    auto& [node, pages, owners] = aside.back();
    withdraw(node, tier);
    node->pages[at(tier)] = std::move(pages);
    if (!owners.empty()) {
      node->owners = std::move(owners);
    } else {
      ++node->parent->children_with[at(tier)];
      settle(node->parent, tier);
    }
    settle(node, tier);
  }
  return out;
}

Freed PrefixTree::clear(const Namespace& space) {
  Freed freed;
  const auto found = tops_.find(space.key);
  if (found == tops_.end()) {
    return freed;
  }
  std::vector<Node*> nodes{found->second};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (Node* child = nodes[i]->first_child; child != nullptr; child = child->next_sibling) {
      nodes.push_back(child);
    }
  }
  for (std::size_t i = nodes.size(); i-- > 1;) {
    Node* node = nodes[i];
    if (node->holds > 0) {
      continue;
    }
    for (Tier tier : kBothTiers) {
      if (node->has(tier)) {
        auto& out = tier == Tier::l1 ? freed.l1 : freed.l2;
        const auto pages = take(node, tier);
        out.insert(out.end(), pages.begin(), pages.end());
      }
    }
    disown(node);
    table_.remove(node);
    store_.destroy(node);
  }
  prune(nodes.front());
  return freed;
}

}  // namespace kvferry
