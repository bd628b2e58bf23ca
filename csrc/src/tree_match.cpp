// Match: the way down a prompt, and what of it is readable.
#include <algorithm>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry {
namespace {

// Asks for memory early: what lies ahead is known from its hash before the tokens here are compared.
void prefetch(const Node* node) {
  constexpr std::size_t kMostBytes = 8192, kLine = 64;
  const auto* bytes = reinterpret_cast<const char*>(node->tokens.data());
  const std::size_t size = std::min(node->tokens.size() * sizeof(std::int32_t), kMostBytes);
  for (std::size_t i = 0; i < size; i += kLine) {
    __builtin_prefetch(bytes + i, 0, 2);
  }
  // the rest of the node, for whoever counts its use
  for (std::size_t i = kLine; i < sizeof(Node); i += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(node) + i, 1, 2);
  }
}

}  // namespace

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
    const auto* chains = reinterpret_cast<const char*>(node->chains.data());
    for (std::size_t i = 0; i < std::min<std::size_t>(node->page_count(), 256); i += 8) {
      __builtin_prefetch(chains + i * sizeof(std::uint64_t), 0, 2);
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

PrefixTree::Step* PrefixTree::last_before(const Walk& walk, std::size_t keys) const {
  for (auto step = walk.steps.rbegin(); step != walk.steps.rend(); ++step) {
    if (step->start < keys) {
      return &*step;
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
  if (const Step* last = last_before(walk, readable)) {
    Node* node = last->node;
    result.node = node->id();
    if (options.pin) {
      ++node->pins;
      ++pins_;
      hold(node);
    }
  }
  return result;
}

}  // namespace kvferry
