// The plan of an insert: what the tree knows already, what it would take, what is refused.
#include "tree_plan.hpp"

#include <algorithm>

#include "kvferry/errors.hpp"

namespace kvferry {

// The child that holds `page` at this place of the same prompt: its valid tail, or a longer version of ours.
Node* PrefixTree::holder_at(const Node* parent, const Tokens& tokens, std::size_t at, std::size_t keys,
                            std::int64_t page) const {
  for (Node* child = parent->first_child; child != nullptr; child = child->next_sibling) {
    const auto& pages = child->pages[kvferry::at(Tier::l1)];
    const std::size_t shared = std::min({child->length, keys - at, shape_.page_size}) + child->lookahead;
    if (!pages.empty() && pages.front() == page &&
        equal_run(child->tokens.data(), tokens, at, shared) == shared) {
      return child;
    }
  }
  return nullptr;
}

void PrefixTree::plan_known(const Walk& walk, const Tokens& tokens, std::span<const std::int64_t> pages,
                            std::span<const std::int8_t> owners, Plan& plan) const {
  const auto& used = used_[at(Tier::l1)];
  const std::size_t page = shape_.page_size;
  const auto foreign = [&](std::int64_t number) {
    return BadInput("page " + std::to_string(number) + " is in the tree already, at another place");
  };
  for (std::size_t i = 0; i < walk.steps.size(); ++i) {
    const Step& step = walk.steps[i];
    const Node* node = step.node;
    const std::size_t first = step.start / page;
    // a tail that goes on in this prompt is the business of plan_rest
    const bool goes_on = step.start + step.keys < walk.keys;
    const std::size_t count = goes_on ? step.keys / page : pages_for(step.keys);
    const std::int64_t* given = pages.data() + first;
    if (node->has(Tier::l1)) {
      const std::int64_t* ours = node->pages[at(Tier::l1)].data();
      if (std::equal(given, given + count, ours)) {
        continue;
      }
      for (std::size_t j = 0; j < count; ++j) {
        if (given[j] == ours[j]) {
          continue;
        }
        if (used[static_cast<std::size_t>(given[j])] == 0) {
          plan.duplicates.push_back(static_cast<std::int64_t>(first + j));
        } else if (j > 0 || holder_at(node->parent, tokens, step.start, walk.keys, given[j]) == nullptr) {
          throw foreign(given[j]);
        }
      }
      continue;
    }
    for (std::size_t j = 0; j < count; ++j) {
      if (used[static_cast<std::size_t>(given[j])] != 0) {
        if (j > 0 || holder_at(node->parent, tokens, step.start, walk.keys, given[j]) == nullptr) {
          throw foreign(given[j]);
        }
        plan.stop_at(step.start);
        return;
      }
      if (holds_l2(node->state) && (owners.empty() ? 0 : owners[first + j]) != node->owners[j]) {
        throw PageMismatch("page position " + std::to_string(first + j) + " has owner " +
                           std::to_string(node->owners[j]) + " in L2, owner " +
                           std::to_string(owners.empty() ? 0 : owners[first + j]) + " is given");
      }
    }
    if (count > 0) {
      plan.adopted.emplace_back(i, count);
      plan.taken.insert(plan.taken.end(), given, given + count);
    }
  }
}

void PrefixTree::plan_rest(const Walk& walk, const Tokens& tokens, std::span<const std::int64_t> pages,
                           Plan& plan) const {
  const std::size_t page = shape_.page_size, grid = walk.matched / page * page, first = grid / page;
  const std::int64_t given = pages[first];
  const Node* last = walk.steps.empty() ? walk.top : walk.steps.back().node;
  Node* holder = nullptr;
  bool tail = false;  // the holder is a valid tail which this prompt continues
  if (grid != walk.matched && last->has(Tier::l1) && last->pages[at(Tier::l1)].back() == given) {
    holder = walk.steps.back().node;
    tail = true;
  } else if (used_[at(Tier::l1)][static_cast<std::size_t>(given)] != 0) {
    if (walk.inside()) {
      // a prompt that ends inside a page of the tree and comes with that very page: known well enough
      const auto& held = last->pages[at(Tier::l1)];
      const std::size_t from = walk.steps.back().keys, shared = walk.keys - grid + last->lookahead;
      if (!held.empty() && held[from / page] == given && walk.keys - grid < page &&
          from + shared <= last->tokens.size() &&
          equal_run(last->tokens.data() + from, tokens, grid, shared) == shared) {
        holder = walk.steps.back().node;
      }
    } else if (last != nullptr) {
      const Node* parent = grid != walk.matched && last->length < page ? last->parent : last;
      holder = holder_at(parent, tokens, grid, walk.keys, given);
      tail = holder != nullptr && holder->length < std::min(page, walk.keys - grid);
    }
    if (holder == nullptr) {
      throw BadInput("page " + std::to_string(given) + " is in the tree already, at another place");
    }
  }
  if (holder == nullptr) {
    plan.taken.insert(plan.taken.end(), pages.begin() + static_cast<std::ptrdiff_t>(first), pages.end());
  } else if (tail && (holder->state == Residency::l1 || holder->state == Residency::l1_l2)) {
    // while a copy of the tail is in flight it must not change: then the rest is not stored
    plan.grown = holder;
    plan.taken.insert(plan.taken.end(), pages.begin() + static_cast<std::ptrdiff_t>(first) + 1, pages.end());
  } else {
    plan.stop_at(walk.matched);
  }
}

}  // namespace kvferry
