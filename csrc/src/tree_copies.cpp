// Copies in flight between the tiers: a ticket for each, which follows its nodes across splits.
#include <algorithm>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry {
namespace {

// A host hit is a path from the top: a child without its parent could never be reached.
void require_backed_up(const Node* parent) {
  if (!parent->root && !holds_l2(parent->state)) {
    throw BadInput("the parent is " + std::string(name(parent->state)) + ": a child is backed up after its parent");
  }
}

}  // namespace

void PrefixTree::require_acks(int acks) const {
  if (acks < 1) {
    throw BadInput("a copy ends with 1 acknowledgement or more, not " + std::to_string(acks));
  }
}

std::int64_t PrefixTree::open_ticket(Event kind, int acks, Node* held, std::vector<Node*>&& nodes) {
  const std::int64_t id = ++last_ticket_;
  for (Node* node : nodes) {
    node->ticket = id;
  }
  ++held->busy;
  hold(held);
  tickets_.emplace(id, Ticket{kind, acks, held, std::move(nodes)});
  return id;
}

Reserved PrefixTree::reserve(const Namespace& space, const Tokens& tokens, std::int64_t first_page,
                             std::span<const std::int64_t> l2_pages, std::span<const std::int8_t> owners,
                             int acks) {
  require_acks(acks);
  const std::size_t page = shape_.page_size;
  const Walk walk = this->walk(space, tokens);
  const std::size_t grid = walk.matched / page * page;
  if (walk.matched == walk.keys) {
    throw BadInput("the tree knows all " + std::to_string(walk.keys) + " tokens: there is nothing to reserve");
  }
  if (first_page < 0 || static_cast<std::size_t>(first_page) != grid / page) {
    throw PageMismatch("a reservation from page " + std::to_string(first_page) + " where the tree knows " +
                       std::to_string(walk.matched) + " tokens: an insert would start at page " +
                       std::to_string(grid / page));
  }
  require_pages(Tier::l2, l2_pages, pages_for(walk.keys - grid));
  require_unused(Tier::l2, l2_pages);
  require_owners(owners, l2_pages.size());
  if (!walk.steps.empty()) {
    const Step& last = walk.steps.back();
    require_backed_up(last.keys < page ? last.node->parent : last.node);
  }
  std::vector<std::int32_t> run(walk.keys - grid + space.lookahead());
  const std::size_t bad = narrow(run.data(), tokens, grid, run.size());
  if (bad != tokens.size) {
    throw BadInput("the token at " + std::to_string(bad) + " is outside 0..2147483647");
  }
  tick();
  Node* node = hang(parent_at_grid(walk, space), std::move(run), owners, grid / page);
  node->state = after(node->state, Event::reserve);
  give(node, Tier::l2, l2_pages);
  const std::int64_t ticket = open_ticket(Event::reserve, acks, node, {node});
  return {node->id(), ticket};
}

std::int64_t PrefixTree::begin_backup(std::int64_t id, std::span<const std::int64_t> l2_pages, int acks) {
  require_acks(acks);
  Node* node = require(id);
  const Residency next = after(node->state, Event::reserve);
  require_pages(Tier::l2, l2_pages, node->page_count());
  require_unused(Tier::l2, l2_pages);
  require_backed_up(node->parent);
  node->state = next;
  give(node, Tier::l2, l2_pages);
  return open_ticket(Event::reserve, acks, node, {node});
}

std::vector<Node*> PrefixTree::loadable(Node* node) const {
  std::vector<Node*> nodes;
  for (; !node->root; node = node->parent) {
    if (node->state == Residency::l2) {
      nodes.push_back(node);
    } else if (!holds_l1(node->state)) {
      throw BadInput("node " + std::to_string(node->id()) + " of the path is " + std::string(name(node->state)) +
                     ": nothing below it can be loaded");
    }
  }
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

std::vector<std::int8_t> PrefixTree::load_owners(std::int64_t id) const {
  std::vector<std::int8_t> owners;
  for (const Node* node : loadable(require(id))) {
    owners.insert(owners.end(), node->owners.begin(), node->owners.end());
  }
  return owners;
}

std::vector<std::int64_t> PrefixTree::load_pages(std::int64_t id) const {
  std::vector<std::int64_t> pages;
  for (const Node* node : loadable(require(id))) {
    const auto& more = node->pages[at(Tier::l2)];
    pages.insert(pages.end(), more.begin(), more.end());
  }
  return pages;
}

std::int64_t PrefixTree::begin_load(std::int64_t id, std::span<const std::int64_t> l1_pages, int acks) {
  require_acks(acks);
  std::vector<Node*> nodes = loadable(require(id));
  if (nodes.empty()) {
    throw BadInput("node " + std::to_string(id) + " and its path are in L1: there is nothing to load");
  }
  std::size_t wanted = 0;
  for (const Node* node : nodes) {
    wanted += node->page_count();
  }
  require_pages(Tier::l1, l1_pages, wanted);
  require_unused(Tier::l1, l1_pages);
  std::size_t first = 0;
  for (Node* node : nodes) {
    node->state = after(node->state, Event::load);
    give(node, Tier::l1, l1_pages.subspan(first, node->page_count()));
    first += node->page_count();
  }
  Node* held = nodes.back();
  return open_ticket(Event::load, acks, held, std::move(nodes));
}

Settled PrefixTree::acknowledge(std::int64_t id) {
  const auto found = tickets_.find(id);
  if (found == tickets_.end()) {
    throw BadInput("no copy in flight has ticket " + std::to_string(id));
  }
  Settled result;
  if (--found->second.acks_missing > 0) {
    return result;
  }
  const Ticket ticket = std::move(found->second);
  tickets_.erase(found);
  for (Node* node : ticket.nodes) {
    node->state = after(node->state, Event::ack);
    node->ticket = 0;
    result.nodes.push_back(node->id());
  }
  --ticket.held->busy;
  release(ticket.held);
  return result;
}

Settled PrefixTree::cancel(std::int64_t id) {
  const auto found = tickets_.find(id);
  if (found == tickets_.end()) {
    throw BadInput("no copy in flight has ticket " + std::to_string(id));
  }
  Settled result;
  const Ticket ticket = std::move(found->second);
  tickets_.erase(found);
  const Tier tier = ticket.kind == Event::load ? Tier::l1 : Tier::l2;
  for (Node* node : ticket.nodes) {
    node->state = after(node->state, Event::cancel);
    node->ticket = 0;
    const auto pages = take(node, tier);
    result.pages.insert(result.pages.end(), pages.begin(), pages.end());
  }
  --ticket.held->busy;
  release(ticket.held);
  return result;
}

}  // namespace kvferry
