// Insert: what the tree knows already, what it takes, what stays with the caller.
#include <algorithm>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry {

// Decided before anything changes.
//
//   prompt   |-- known, in L1 --|-- known, not in L1 --|-- rest --|
//   pages      duplicates         adopted                 grown tail or new node
struct PrefixTree::Plan {
  bool stopped = false;  // the rest cannot be stored: its page lives on in a place that must not change
  std::size_t stop = 0;  // where, in keys
  std::vector<std::pair<std::size_t, std::size_t>> adopted;  // step, its pages
  Node* grown = nullptr;
  std::vector<std::int64_t> duplicates;
  std::vector<std::int64_t> taken;  // every page that changes hands, and every duplicate

  void stop_at(std::size_t keys) {
    stopped = true;
    stop = keys;
  }
};

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

Inserted PrefixTree::insert(const Namespace& space, const Tokens& tokens, std::span<const std::int64_t> pages,
                            std::span<const std::int8_t> owners, bool pin) {
  const std::size_t keys = space.keys(tokens), page = shape_.page_size, extra = space.lookahead();
  if (keys == 0) {
    throw BadInput("a prompt of " + std::to_string(tokens.size) + " tokens has no key to insert");
  }
  require_pages(Tier::l1, pages, pages_for(keys));
  require_owners(owners, pages.size());
  const Walk walk = this->walk(space, tokens);
  Plan plan;
  plan_known(walk, tokens, pages, owners, plan);
  const bool rest = !plan.stopped && walk.matched < keys;
  std::vector<std::int32_t> run;
  const std::size_t grid = walk.matched / page * page;
  if (rest) {
    plan_rest(walk, tokens, pages, plan);
  }
  if (rest && !plan.stopped) {
    run.resize(keys - grid + extra);
    const std::size_t bad = narrow(run.data(), tokens, grid, run.size());
    if (bad != tokens.size) {
      throw BadInput("the token at " + std::to_string(bad) + " is outside 0..2147483647");
    }
  }
  if (plan.stopped) {
    const std::size_t first = (plan.stop + page - 1) / page;  // a tail that stays where it is was not ours to free
    for (std::size_t i = first; i < pages.size(); ++i) {
      if (used_[at(Tier::l1)][static_cast<std::size_t>(pages[i])] == 0) {
        plan.duplicates.push_back(static_cast<std::int64_t>(i));
      }
    }
  }
  for (std::int64_t position : plan.duplicates) {
    plan.taken.push_back(pages[static_cast<std::size_t>(position)]);
  }
  require_unused(Tier::l1, plan.taken);

  Inserted result;
  result.known_tokens = static_cast<std::int64_t>(walk.matched);
  result.duplicates = std::move(plan.duplicates);
  for (const auto& [index, count] : plan.adopted) {
    Step& step = walk.steps[index];
    if (count < step.node->page_count()) {
      step.node = cut(step.node, count);
      step.keys = step.node->length;
    }
    const std::size_t first = step.start / page;
    step.node->state = after(step.node->state, Event::insert);
    give(step.node, Tier::l1, pages.subspan(first, count));
    if (!owners.empty()) {
      const auto from = owners.begin() + static_cast<std::ptrdiff_t>(first);
      step.node->owners.assign(from, from + static_cast<std::ptrdiff_t>(count));
    }
    settle(step.node);
  }
  Node* end = nullptr;
  if (rest && !plan.stopped) {
    const std::size_t first = grid / page;
    const auto part = owners.empty() ? owners : owners.subspan(first);
    if (plan.grown != nullptr) {
      end = grow(plan.grown, pages.subspan(first), part, std::move(run), result);
    } else {
      end = hang(parent_at_grid(walk, space), std::move(run), part);
      end->state = after(end->state, Event::insert);
      give(end, Tier::l1, pages.subspan(first));
      settle(end);
    }
    result.tokens = static_cast<std::int64_t>(keys);
  } else {
    const std::size_t stored = plan.stopped ? std::min(plan.stop, walk.matched) : keys;
    end = last_before(walk, stored);
    result.tokens = static_cast<std::int64_t>(stored);
  }
  if (end != nullptr) {
    for (Node* node = end; !node->root; node = node->parent) {
      lists_[at(Tier::l1)].touch(node);
      lists_[at(Tier::l2)].touch(node);
    }
    result.node = end->id();
    if (pin) {
      this->pin(result.node);
    }
  }
  return result;
}

Node* PrefixTree::parent_at_grid(const Walk& walk, const Namespace& space) {
  if (walk.steps.empty()) {
    if (walk.top != nullptr) {
      return walk.top;
    }
    const auto place = tops_.emplace(space.key, store_.create()).first;
    Node* top = place->second;
    top->root = true;
    top->space = &place->first;
    top->chain_end = space.seed;
    top->lookahead = static_cast<std::uint8_t>(space.lookahead());
    return top;
  }
  const Step& step = walk.steps.back();
  const std::size_t whole = step.keys / shape_.page_size;
  if (whole == 0) {
    return step.node->parent;
  }
  return step.node->length > whole * shape_.page_size ? cut(step.node, whole) : step.node;
}

// A new node without pages below `parent`, for the run of tokens that starts where the parent ends.
Node* PrefixTree::hang(Node* parent, std::vector<std::int32_t>&& run, std::span<const std::int8_t> owners) {
  Node* node = store_.create();
  node->lookahead = parent->lookahead;
  write(node, parent->chain_end, std::move(run));
  node->owners.assign(owners.begin(), owners.end());
  node->owners.resize(node->page_count());
  table_.add(node);
  adopt(node, parent);
  return node;
}

void PrefixTree::write(Node* node, std::uint64_t before, std::vector<std::int32_t>&& run) const {
  node->tokens = std::move(run);
  node->length = node->tokens.size() - node->lookahead;
  node->chains.clear();
  node->chains.reserve(pages_for(node->length));
  const Tokens tokens(std::span<const std::int32_t>(node->tokens));
  for (std::size_t at = 0; at < node->length; at += shape_.page_size) {
    const std::size_t count = std::min(shape_.page_size, node->length - at) + node->lookahead;
    before = key_of(before, tokens, at, count);
    node->chains.push_back(before);
  }
  node->key = node->chains.front();
  node->chain_end = before;
}

// A valid tail becomes longer in place: its page is the one that the request went on writing. An L2 copy of
// the shorter tail is stale and comes back in `result`.
Node* PrefixTree::grow(Node* node, std::span<const std::int64_t> pages, std::span<const std::int8_t> owners,
                       std::vector<std::int32_t>&& run, Inserted& result) {
  const std::size_t whole = node->length / shape_.page_size;
  if (whole > 0) {
    cut(node, whole);
  }
  if (node->has(Tier::l2)) {
    result.freed_l2 = take(node, Tier::l2);
    node->state = after(node->state, Event::drop_l2);
  }
  Node* parent = node->parent;
  const std::int8_t owner = node->owners.front();
  const bool listed = node->links[at(Tier::l1)].in;
  if (listed) {
    lists_[at(Tier::l1)].remove(node);
  }
  disown(node);
  table_.remove(node);
  write(node, parent->chain_end, std::move(run));
  node->owners.assign(owners.begin(), owners.end());
  node->owners.resize(node->page_count());
  node->owners.front() = owner;  // where its bytes are does not change
  held_pages_[at(Tier::l1)] += static_cast<std::int64_t>(pages.size()) - 1;
  for (std::int64_t page : pages) {
    used_[at(Tier::l1)][static_cast<std::size_t>(page)] = 1;
  }
  node->pages[at(Tier::l1)].assign(pages.begin(), pages.end());
  table_.add(node);
  adopt(node, parent);
  settle(node);
  return node;
}

}  // namespace kvferry
