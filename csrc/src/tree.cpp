#include "kvferry/tree.hpp"

#include <algorithm>
#include <limits>

#include "kvferry/errors.hpp"

namespace kvferry {
namespace {

std::string text(std::integral auto value) { return std::to_string(value); }

}  // namespace

PrefixTree::PrefixTree(const TreeShape& shape) : shape_(shape) {
  if (shape.page_size < 1 || shape.page_size > (1U << 20)) {
    throw BadInput("a page holds 1 to 1048576 tokens, not " + text(shape.page_size));
  }
  constexpr std::int64_t kMostPages = std::numeric_limits<std::int32_t>::max();
  if (shape.l1_pages < 0 || shape.l1_pages > kMostPages || shape.l2_pages < 0 || shape.l2_pages > kMostPages) {
    throw BadInput("a tier has 0 to " + text(kMostPages) + " pages, not " + text(shape.l1_pages) + " and " +
                   text(shape.l2_pages));
  }
  if (shape.lanes < 1 || shape.lanes > 127) {
    throw BadInput("there are 1 to 127 lanes, not " + text(shape.lanes));
  }
  if (shape.hash_bits < 0 || shape.hash_bits > 64) {
    throw BadInput("a hash has 0 to 64 bits, not " + text(shape.hash_bits));
  }
  for (const std::string& policy : shape.policies) {
    require_policy(policy);
  }
  if (std::any_of(shape.policies.begin(), shape.policies.end(), learns)) {
    history_ = std::make_unique<ReuseHistory>(clock_, shape.page_size, std::max(shape.l1_pages, shape.l2_pages));
  }
  for (Tier tier : kBothTiers) {
    policies_[at(tier)] = make_policy(shape.policies[at(tier)], tier, clock_, history_.get());
  }
  hash_mask_ = shape.hash_bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << shape.hash_bits) - 1;
  used_[at(Tier::l1)].resize(static_cast<std::size_t>(shape.l1_pages));
  used_[at(Tier::l2)].resize(static_cast<std::size_t>(shape.l2_pages));
}

PrefixTree::~PrefixTree() = default;

// --- pins ----------------------------------------------------------------------------------------

void PrefixTree::pin(std::int64_t id) {
  Node* node = require(id);
  ++node->pins;
  ++pins_;
  hold(node);
}

void PrefixTree::unpin(std::int64_t id) {
  Node* node = require(id);
  if (node->pins == 0) {
    throw BadInput("node " + text(id) + " is not pinned: unpinned twice");
  }
  --node->pins;
  --pins_;
  release(node);
}

void PrefixTree::hold(Node* node) {
  for (; node != nullptr; node = node->parent) {
    if (node->holds++ == 0) {
      settle(node);
    }
  }
}

void PrefixTree::release(Node* node) {
  for (Node* n = node; n != nullptr; n = n->parent) {
    if (--n->holds == 0) {
      settle(n);
    }
  }
  prune(node);
}

// --- validation and views --------------------------------------------------------------------------------

Node* PrefixTree::require(std::int64_t id) const {
  Node* node = store_.find(id);
  if (node == nullptr || node->root) {
    throw BadInput("no node " + text(id) + " in the tree");
  }
  return node;
}

void PrefixTree::require_pages(Tier tier, std::span<const std::int64_t> pages, std::size_t wanted) const {
  if (pages.size() != wanted) {
    throw PageMismatch(text(pages.size()) + " pages are given where " + text(wanted) + " are needed");
  }
  const auto limit = static_cast<std::uint64_t>(used_[at(tier)].size());
  for (std::int64_t page : pages) {
    if (static_cast<std::uint64_t>(page) >= limit) {
      throw BadInput("page " + text(page) + " is outside the " + text(limit) + " pages of the tier");
    }
  }
}

void PrefixTree::require_unused(Tier tier, std::span<const std::int64_t> pages) const {
  std::vector<std::int64_t> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw BadInput("page " + text(*twice) + " is given twice");
  }
  for (std::int64_t page : pages) {
    if (used_[at(tier)][static_cast<std::size_t>(page)] != 0) {
      throw BadInput("page " + text(page) + " is in the tree already, at another place");
    }
  }
}

void PrefixTree::require_owners(std::span<const std::int8_t> owners, std::size_t wanted) const {
  if (owners.size() != wanted && !(owners.empty() && shape_.lanes == 1)) {
    throw PageMismatch(text(owners.size()) + " owners are given for " + text(wanted) + " pages");
  }
  for (std::int8_t owner : owners) {
    if (owner < 0 || owner >= shape_.lanes) {
      throw BadInput("owner " + text(static_cast<int>(owner)) + " is outside the " + text(shape_.lanes) + " lanes");
    }
  }
}

NodeInfo PrefixTree::node(std::int64_t id) const {
  const Node* node = require(id);
  NodeInfo info;
  info.id = id;
  info.parent = node->parent->root ? 0 : node->parent->id();
  for (const Node* n = node->parent; n != nullptr; n = n->parent) {
    info.start += static_cast<std::int64_t>(n->length);
  }
  info.tokens = static_cast<std::int64_t>(node->length);
  info.state = node->state;
  info.l1_pages = node->pages[at(Tier::l1)];
  info.l2_pages = node->pages[at(Tier::l2)];
  info.owners = node->owners;
  info.pins = node->pins;
  info.holds = node->holds;
  info.ticket = node->ticket;
  return info;
}

std::vector<std::int64_t> PrefixTree::path(std::int64_t id) const {
  std::vector<std::int64_t> ids;
  for (const Node* node = require(id); !node->root; node = node->parent) {
    ids.push_back(node->id());
  }
  std::reverse(ids.begin(), ids.end());
  return ids;
}

TreeStats PrefixTree::stats() const {
  TreeStats s;
  s.namespaces = static_cast<std::int64_t>(tops_.size());
  s.nodes = static_cast<std::int64_t>(table_.size());
  s.tickets = static_cast<std::int64_t>(tickets_.size());
  s.pins = pins_;
  s.l1_pages = held_pages_[at(Tier::l1)];
  s.l2_pages = held_pages_[at(Tier::l2)];
  s.evictable_l1_pages = evictable_pages_[at(Tier::l1)];
  s.evictable_l2_pages = evictable_pages_[at(Tier::l2)];
  return s;
}

}  // namespace kvferry
