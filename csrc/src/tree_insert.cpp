// Insert: what the tree knows already, what it takes, what stays with the caller.
#include <algorithm>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"
#include "tree_plan.hpp"

namespace kvferry {

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

  tick();
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
      end = grow(plan.grown, pages.subspan(first), part, std::move(run), first, result);
    } else {
      end = hang(parent_at_grid(walk, space), std::move(run), part, first);
      end->state = after(end->state, Event::insert);
      give(end, Tier::l1, pages.subspan(first));
      settle(end);
    }
    result.tokens = static_cast<std::int64_t>(keys);
  } else {
    const std::size_t stored = plan.stopped ? std::min(plan.stop, walk.matched) : keys;
    if (Step* last = last_before(walk, stored)) {
      cut_behind(*last, stored - last->start);
      end = last->node;
    }
    result.tokens = static_cast<std::int64_t>(stored);
  }
  if (end != nullptr) {
    for (Node* node = end; !node->root; node = node->parent) {
      refresh(node);
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
Node* PrefixTree::hang(Node* parent, std::vector<std::int32_t>&& run, std::span<const std::int8_t> owners,
                       std::size_t first_page) {
  Node* node = store_.create();
  node->lookahead = parent->lookahead;
  write(node, parent->chain_end, std::move(run));
  node->owners.assign(owners.begin(), owners.end());
  node->owners.resize(node->page_count());
  table_.add(node);
  adopt(node, parent);
  arrive(node, first_page);
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
                       std::vector<std::int32_t>&& run, std::size_t first_page, Inserted& result) {
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
  withdraw(node, Tier::l1);
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
  const std::uint32_t uses = node->use.uses;
  arrive(node, first_page);
  node->use.uses = uses;  // its front has been here all the time
  settle(node);
  return node;
}

}  // namespace kvferry
