// Use: what the eviction policies are told, and when.
#include <algorithm>

#include "kvferry/tree.hpp"

namespace kvferry {

void PrefixTree::settle(Node* node) {
  for (Tier tier : kBothTiers) {
    settle(node, tier);
  }
}

void PrefixTree::settle(Node* node, Tier tier) {
  Node::Standing& standing = node->standing[at(tier)];
  const auto pages = node->holds == 0 ? static_cast<std::int64_t>(node->pages[at(tier)].size()) : 0;
  evictable_pages_[at(tier)] += pages - standing.counted;
  standing.counted = pages;
  const bool next = pages > 0 && node->children_with[at(tier)] == 0;
  if (next != standing.offered) {
    next ? policies_[at(tier)]->offer(node) : policies_[at(tier)]->withdraw(node);
  }
}

void PrefixTree::withdraw(Node* node, Tier tier) {
  if (node->standing[at(tier)].offered) {
    policies_[at(tier)]->withdraw(node);
  }
}

// The pages behind the last one that is used here would pass for used otherwise: a conversation goes on from somewhere
// inside its last prompt, and what follows there is of no use to anybody.
void PrefixTree::cut_behind(Step& step, std::size_t keys) {
  const std::size_t pages = pages_for(keys);
  if (pages > 0 && pages < step.node->page_count()) {
    step.node = cut(step.node, pages);
    step.keys = std::min(step.keys, step.node->length);
  }
}

// Calls `visit` with each of the first `pages` of a node that the history samples.
template <typename Visit>
void PrefixTree::sample(const Node* node, std::size_t first_page, std::size_t pages, Visit&& visit) const {
  const std::size_t grain = history_->grain(), first = grain - 1 - first_page % grain;
  for (std::size_t i = first; i < pages; i += grain) {
    if (history_->sampled(node->chains[i])) {
      visit(i, node->chains[i]);
    }
  }
}

// One hash of a page names the whole prompt up to it, so that a page for each grain of 512 tokens says enough. The
// history is asked for all of them in three rounds: each finds in the cache what the one before it has asked for.
void PrefixTree::touch(const Walk& walk) {
  tick();
  if (!walk.steps.empty()) {
    cut_behind(walk.steps.back(), walk.steps.back().keys);
  }
  if (history_ != nullptr) {
    sampled_.clear();
    for (const Step& step : walk.steps) {
      sample(step.node, step.start / shape_.page_size, pages_for(step.keys), [this](std::size_t, std::uint64_t hash) {
        history_->prefetch_head(hash);
        sampled_.push_back(hash);
      });
    }
    for (const std::uint64_t hash : sampled_) {
      history_->prefetch_entry(hash);
    }
    for (const std::uint64_t hash : sampled_) {
      history_->use(hash);
    }
  }
  for (const Step& step : walk.steps) {
    Node* node = step.node;
    node->use.last = clock_.now;
    ++node->use.uses;
    for (Tier tier : kBothTiers) {
      if (node->has(tier)) {
        policies_[at(tier)]->used(node);
      }
    }
  }
}

void PrefixTree::refresh(Node* node) {
  node->use.last = clock_.now;
  for (Tier tier : kBothTiers) {
    if (node->has(tier)) {
      policies_[at(tier)]->used(node);
    }
  }
}

// The history knows how often a prompt came before it was evicted: what comes back goes on from there. Of a node
// that was there in part the middle counts.
void PrefixTree::arrive(Node* node, std::size_t first_page) {
  node->use = {clock_.now, 0};
  if (history_ == nullptr) {
    return;
  }
  bool first = true;
  sample(node, first_page, node->page_count(), [&](std::size_t page, std::uint64_t hash) {
    const std::uint32_t uses = history_->use(hash);
    if (first || page <= node->page_count() / 2) {
      node->use.uses = uses;
    }
    first = false;
  });
}

void PrefixTree::tick() {
  ++clock_.now;
  if (history_ != nullptr) {
    history_->tick();
  }
}

}  // namespace kvferry
