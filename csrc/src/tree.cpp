#include "kvferry/tree.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "kvferry/errors.hpp"

namespace kvferry {
namespace {

std::string text(std::integral auto value) { return std::to_string(value); }

// Asks for memory early: what lies ahead is known from its hash before the tokens here are compared.
void prefetch(const Node* node) {
  constexpr std::size_t kMostBytes = 8192, kLine = 64;
  const auto* bytes = reinterpret_cast<const char*>(node->tokens.data());
  const std::size_t size = std::min(node->tokens.size() * sizeof(std::int32_t), kMostBytes);
  for (std::size_t i = 0; i < size; i += kLine) {
    __builtin_prefetch(bytes + i, 0, 2);
  }
}

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
  hash_mask_ = shape.hash_bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << shape.hash_bits) - 1;
  used_[at(Tier::l1)].resize(static_cast<std::size_t>(shape.l1_pages));
  used_[at(Tier::l2)].resize(static_cast<std::size_t>(shape.l2_pages));
}

PrefixTree::~PrefixTree() = default;

// --- finding ---------------------------------------------------------------------------------------------

std::uint64_t PrefixTree::key_of(std::uint64_t before, const Tokens& tokens, std::size_t at,
                                 std::size_t count) const {
  return chain(before, hash_run(tokens, at, count)) & hash_mask_;
}

Node* PrefixTree::find_child(Node* parent, const Tokens& tokens, std::size_t at, std::size_t keys) const {
  if (parent->first_child == nullptr) {
    return nullptr;
  }
  const std::size_t rest = keys - at, page = shape_.page_size, extra = parent->lookahead;
  if (rest >= page) {
    const std::uint64_t key = key_of(parent->chain_end, tokens, at, page + extra);
    for (Node* node = table_.bucket(key); node != nullptr; node = node->next_in_bucket) {
      if (node->key == key && node->parent == parent && node->length >= page &&
          equal_run(node->tokens.data(), tokens, at, page + extra) == page + extra) {
        return node;
      }
    }
  }
  for (const auto& [length, count] : parent->tails) {
    if (length > rest) {
      continue;
    }
    const std::uint64_t key = key_of(parent->chain_end, tokens, at, length + extra);
    for (Node* node = table_.bucket(key); node != nullptr; node = node->next_in_bucket) {
      if (node->key == key && node->parent == parent && node->length == length &&
          equal_run(node->tokens.data(), tokens, at, length + extra) == length + extra) {
        return node;
      }
    }
  }
  return nullptr;
}

// One hash per node finds the way down; then every token of the node is compared. A node that differs is
// left at the last page boundary before the difference, a valid tail matches whole or not at all.
PrefixTree::Walk PrefixTree::walk(const Namespace& space, const Tokens& tokens) const {
  steps_.clear();
  const std::size_t keys = space.keys(tokens), page = shape_.page_size;
  const auto found = tops_.find(space.key);
  if (found == tops_.end()) {
    return {steps_, nullptr, keys, 0};
  }
  const std::size_t extra = space.lookahead();
  std::size_t matched = 0;
  Node* next = find_child(found->second, tokens, 0, keys);
  while (next != nullptr) {
    Node* node = next;
    next = nullptr;
    const std::size_t length = node->length, shared = std::min(length, keys - matched);
    const std::size_t known = std::min(length, page);  // compared by find_child
    if (shared == length && length % page == 0 && matched + length < keys) {
      next = find_child(node, tokens, matched + length, keys);
      if (next != nullptr) {
        prefetch(next);
      }
    }
    std::size_t equal = known + equal_run(node->tokens.data() + known, tokens, matched + known,
                                          shared + extra - known);
    equal = std::min(equal - std::min(equal, extra), shared);
    if (equal < length) {
      next = nullptr;
      equal = equal / page * page;
    }
    steps_.push_back({node, matched, equal});
    matched += equal;
  }
  return {steps_, found->second, keys, matched};
}

Node* PrefixTree::last_before(const Walk& walk, std::size_t keys) const {
  for (auto step = walk.steps.rbegin(); step != walk.steps.rend(); ++step) {
    if (step->start < keys) {
      return step->node;
    }
  }
  return nullptr;
}

Match PrefixTree::match(const Namespace& space, const Tokens& tokens, const MatchOptions& options) {
  if ((options.draft == Draft::one_token_further) != space.bigrams && options.draft != Draft::none) {
    throw BadInput(space.bigrams ? "a namespace of bigrams knows its last draft row: no page is recomputed"
                                 : "a draft is keyed one token further in a namespace of bigrams only");
  }
  const Walk walk = this->walk(space, tokens);
  std::size_t readable = 0, l1 = 0;
  for (const Step& step : walk.steps) {
    const std::size_t end = step.start + step.keys;
    if (l1 == step.start && in_l1(step.node->state)) {
      l1 = readable = end;
    } else if (in_l2(step.node->state)) {
      readable = end;
    } else {
      break;
    }
  }
  const std::size_t page = shape_.page_size;
  if (options.draft == Draft::recompute_last_page && readable > 0) {
    readable = (readable - 1) / page * page;
  }
  if (options.floor) {
    readable = readable / page * page;
  }
  l1 = std::min(l1, readable);

  Match result;
  result.tokens = static_cast<std::int64_t>(readable);
  result.l1_tokens = static_cast<std::int64_t>(l1);
  result.known_tokens = static_cast<std::int64_t>(walk.matched);
  result.pages.reserve(pages_for(l1));
  for (const Step& step : walk.steps) {
    if (step.start >= l1) {
      break;
    }
    const auto& pages = step.node->pages[at(Tier::l1)];
    const std::size_t count = pages_for(std::min(step.keys, l1 - step.start));
    result.pages.insert(result.pages.end(), pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(count));
  }
  if (options.touch) {
    touch(walk);
  }
  if (Node* node = last_before(walk, readable)) {
    result.node = node->id();
    if (options.pin) {
      ++node->pins;
      ++pins_;
      hold(node);
    }
  }
  return result;
}

// --- pins and use ----------------------------------------------------------------------------------------

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
      settle(n);  // from below upwards: the parent becomes newer than its child
    }
  }
  prune(node);
}

void PrefixTree::settle(Node* node) {
  for (Tier tier : kBothTiers) {
    const bool wanted = node->holds == 0 && node->has(tier);
    if (wanted != node->links[at(tier)].in) {
      wanted ? lists_[at(tier)].add(node) : lists_[at(tier)].remove(node);
    }
  }
}

void PrefixTree::touch(const Walk& walk) {
  for (auto step = walk.steps.rbegin(); step != walk.steps.rend(); ++step) {
    lists_[at(Tier::l1)].touch(step->node);
    lists_[at(Tier::l2)].touch(step->node);
  }
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
  s.evictable_l1_pages = lists_[at(Tier::l1)].pages();
  s.evictable_l2_pages = lists_[at(Tier::l2)].pages();
  return s;
}

}  // namespace kvferry
