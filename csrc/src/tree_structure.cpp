// The shape of the tree: cutting nodes on the page grid, hanging them in and out, pages in and out of them.
#include <algorithm>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry {

std::int64_t PrefixTree::split(std::int64_t id, std::int64_t tokens) {
  Node* node = require(id);
  const auto page = static_cast<std::int64_t>(shape_.page_size);
  if (tokens <= 0 || tokens >= static_cast<std::int64_t>(node->length)) {
    throw BadInput("a split at " + std::to_string(tokens) + " is outside the " + std::to_string(node->length) +
                   " tokens of the node");
  }
  if (tokens % page != 0) {
    throw BadInput("a split at " + std::to_string(tokens) + " is off the grid of " + std::to_string(page) +
                   " tokens: a page has one owner");
  }
  return cut(node, static_cast<std::size_t>(tokens / page))->id();
}

namespace {

template <typename T>
std::vector<T> take_front(std::vector<T>& from, std::size_t count, std::size_t shared = 0) {
  const auto end = from.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<T> front(from.begin(), end + static_cast<std::ptrdiff_t>(shared));
  from = std::vector<T>(end, from.end());  // a vector of its own: the old one would keep all the memory
  return front;
}

}  // namespace

// before   parent - node(0..n)
// after    parent - front(0..k) - node(k..n)       the node keeps its id, pins, children and copies in flight
Node* PrefixTree::cut(Node* node, std::size_t page) {
  const std::size_t tokens = page * shape_.page_size;
  Node* front = store_.create();
  Node* parent = node->parent;
  for (Tier tier : kBothTiers) {
    withdraw(node, tier);
  }
  disown(node);
  table_.remove(node);
  front->lookahead = node->lookahead;
  front->tokens = take_front(node->tokens, tokens, node->lookahead);
  front->chains = take_front(node->chains, page);
  front->owners = take_front(node->owners, page);
  for (Tier tier : kBothTiers) {
    if (node->has(tier)) {
      front->pages[at(tier)] = take_front(node->pages[at(tier)], page);
    }
  }
  front->length = tokens;
  front->key = node->key;
  front->chain_end = front->chains.back();
  front->state = node->state;
  front->holds = node->holds;
  front->use = node->use;
  front->ticket = node->ticket;
  node->length -= tokens;
  node->key = node->chains.front();
  table_.add(front);
  table_.add(node);
  adopt(front, parent);
  adopt(node, front);
  if (node->ticket != 0) {
    tickets_.at(node->ticket).nodes.push_back(front);
  }
  for (Tier tier : kBothTiers) {
    Node::Standing& standing = front->standing[at(tier)];
    standing = node->standing[at(tier)];
    standing.offered = false;
    standing.counted = 0;
    settle(node, tier);
    settle(front, tier);
  }
  return front;
}

void PrefixTree::adopt(Node* child, Node* parent) {
  child->parent = parent;
  child->previous_sibling = nullptr;
  child->next_sibling = parent->first_child;
  if (parent->first_child != nullptr) {
    parent->first_child->previous_sibling = child;
  }
  parent->first_child = child;
  for (Tier tier : kBothTiers) {
    parent->children_with[at(tier)] += child->has(tier);
  }
  count_tail(parent, child->length, 1);
}

void PrefixTree::disown(Node* child) {
  Node* parent = child->parent;
  (child->previous_sibling == nullptr ? parent->first_child : child->previous_sibling->next_sibling) =
      child->next_sibling;
  if (child->next_sibling != nullptr) {
    child->next_sibling->previous_sibling = child->previous_sibling;
  }
  for (Tier tier : kBothTiers) {
    parent->children_with[at(tier)] -= child->has(tier);
  }
  count_tail(parent, child->length, -1);
  child->parent = child->next_sibling = child->previous_sibling = nullptr;
}

void PrefixTree::count_tail(Node* parent, std::size_t length, int by) {
  if (length >= shape_.page_size) {
    return;
  }
  auto& tails = parent->tails;
  const auto place = std::find_if(tails.begin(), tails.end(), [&](const auto& t) { return t.first <= length; });
  if (place == tails.end() || place->first != length) {
    tails.insert(place, {static_cast<std::uint32_t>(length), 1U});
  } else if ((place->second += static_cast<std::uint32_t>(by)) == 0) {
    tails.erase(place);
  }
}

void PrefixTree::prune(Node* node) {
  while (node->state == Residency::absent && node->holds == 0 && node->first_child == nullptr) {
    if (node->root) {
      const auto place = tops_.find(*node->space);
      store_.destroy(node);
      tops_.erase(place);
      return;
    }
    Node* parent = node->parent;
    disown(node);
    table_.remove(node);
    store_.destroy(node);
    node = parent;
  }
}

void PrefixTree::give(Node* node, Tier tier, std::span<const std::int64_t> pages) {
  node->pages[at(tier)].assign(pages.begin(), pages.end());
  for (std::int64_t page : pages) {
    used_[at(tier)][static_cast<std::size_t>(page)] = 1;
  }
  held_pages_[at(tier)] += static_cast<std::int64_t>(pages.size());
  ++node->parent->children_with[at(tier)];
  settle(node->parent, tier);
  policies_[at(tier)]->entered(node);
}

std::vector<std::int64_t> PrefixTree::take(Node* node, Tier tier) {
  withdraw(node, tier);
  std::vector<std::int64_t> pages;
  pages.swap(node->pages[at(tier)]);
  for (std::int64_t page : pages) {
    used_[at(tier)][static_cast<std::size_t>(page)] = 0;
  }
  held_pages_[at(tier)] -= static_cast<std::int64_t>(pages.size());
  settle(node, tier);
  --node->parent->children_with[at(tier)];
  settle(node->parent, tier);
  return pages;
}

}  // namespace kvferry
