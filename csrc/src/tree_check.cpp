// Every promise that the tree makes about itself, checked from the outside in.
#include <algorithm>
#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry {
namespace {

std::string text(std::string_view part) { return std::string(part); }
std::string text(std::integral auto part) { return std::to_string(part); }

[[noreturn]] void fail(const Node* node, std::initializer_list<std::string> parts) {
  std::string message = "prefix tree, node " + std::to_string(node == nullptr ? 0 : node->id()) + ":";
  for (const std::string& part : parts) {
    message += ' ' + part;
  }
  throw IntegrityError(message);
}

template <typename... Parts>
void expect(bool good, const Node* node, const Parts&... parts) {
  if (!good) {
    fail(node, {text(parts)...});
  }
}

}  // namespace

void PrefixTree::check_node(const Node* node) const {
  const std::size_t page = shape_.page_size;
  expect(store_.find(node->id()) == node, node, "the store does not know it");
  expect(node->lookahead == node->parent->lookahead, node, "keyed unlike its parent");
  expect(node->parent->root || node->parent->length % page == 0, node, "hangs below a valid tail of",
         node->parent->length);
  expect(node->length > 0 && node->tokens.size() == node->length + node->lookahead, node, node->tokens.size(),
         "tokens for a length of", node->length);
  expect(node->page_count() == pages_for(node->length), node, node->page_count(), "page hashes for a length of",
         node->length);
  expect(node->owners.size() == node->page_count(), node, node->owners.size(), "owners for", node->page_count(),
         "pages");
  const Tokens tokens(std::span<const std::int32_t>(node->tokens));
  std::uint64_t hash = node->parent->chain_end;
  for (std::size_t i = 0; i < node->page_count(); ++i) {
    const std::size_t from = i * page;
    hash = key_of(hash, tokens, from, std::min(page, node->length - from) + node->lookahead);
    expect(hash == node->chains[i], node, "wrong hash of page", i);
  }
  expect(node->key == node->chains.front() && node->chain_end == hash, node, "key or end hash differ");
  const Node* found = table_.bucket(node->key);
  while (found != nullptr && found != node) {
    found = found->next_in_bucket;
  }
  expect(found == node, node, "is not in the table");
  const std::array<bool, kTiers> should_have = {holds_l1(node->state), holds_l2(node->state)};
  for (Tier tier : kBothTiers) {
    const std::size_t wanted = should_have[at(tier)] ? node->page_count() : 0;
    expect(node->pages[at(tier)].size() == wanted, node, node->pages[at(tier)].size(), "pages in L", at(tier) + 1,
           "of", node->page_count(), "while", name(node->state));
    const Node::Standing& standing = node->standing[at(tier)];
    const std::size_t free = node->holds == 0 ? wanted : 0;
    expect(standing.counted == static_cast<std::int64_t>(free), node, standing.counted, "pages counted as evictable in L",
           at(tier) + 1, "of", free);
    expect(standing.offered == (free > 0 && node->children_with[at(tier)] == 0), node, "next to go is",
           static_cast<int>(standing.offered), "in L", at(tier) + 1, "with", node->holds, "holds and",
           node->children_with[at(tier)], "children");
  }
  const bool copying = node->state == Residency::pending || node->state == Residency::l1_pending ||
                       node->state == Residency::loading;
  expect(copying == (node->ticket != 0), node, "has ticket", node->ticket, "while", name(node->state));
  expect(node->state != Residency::absent || node->first_child != nullptr || node->holds > 0, node,
         "is absent and still here");
}

void PrefixTree::check_children(const Node* node) const {
  std::uint64_t holds = std::uint64_t{node->pins} + node->busy;
  std::array<std::uint32_t, kTiers> with{};
  std::vector<std::pair<std::uint32_t, std::uint32_t>> tails;
  const Node* previous = nullptr;
  for (const Node* child = node->first_child; child != nullptr; child = child->next_sibling) {
    expect(child->parent == node && child->previous_sibling == previous, child, "is linked wrongly");
    previous = child;
    holds += child->holds;
    for (Tier tier : kBothTiers) {
      with[at(tier)] += child->has(tier);
    }
    if (child->length < shape_.page_size) {
      const auto length = static_cast<std::uint32_t>(child->length);
      const auto place = std::find_if(tails.begin(), tails.end(), [&](auto& t) { return t.first <= length; });
      if (place != tails.end() && place->first == length) {
        ++place->second;
      } else {
        tails.insert(place, {length, 1U});
      }
    }
  }
  expect(holds == node->holds, node, node->holds, "holds, its own and its children's are", holds);
  expect(with == node->children_with, node, "counts children with pages", node->children_with[0],
         node->children_with[1], "has", with[0], with[1]);
  expect(tails == node->tails, node, "counts", node->tails.size(), "lengths of tails, has", tails.size());
}

void PrefixTree::check_integrity() const {
  std::vector<const Node*> nodes;
  std::int64_t pins = 0;
  std::size_t in_table = 0;
  std::array<std::vector<std::uint8_t>, kTiers> seen = {std::vector<std::uint8_t>(used_[0].size()),
                                                        std::vector<std::uint8_t>(used_[1].size())};
  std::array<std::int64_t, kTiers> held{}, evictable{};
  for (const auto& [key, top] : tops_) {
    expect(top->root && top->space == &key && top->first_child != nullptr, top, "is no top of a namespace");
    nodes.push_back(top);
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node* node = nodes[i];
    check_children(node);
    for (const Node* child = node->first_child; child != nullptr; child = child->next_sibling) {
      nodes.push_back(child);
    }
    if (node->root) {
      continue;
    }
    check_node(node);
    ++in_table;
    pins += node->pins;
    for (Tier tier : kBothTiers) {
      for (std::int64_t page : node->pages[at(tier)]) {
        const auto index = static_cast<std::size_t>(page);
        expect(index < seen[at(tier)].size() && seen[at(tier)][index]++ == 0, node, "page", page, "of L",
               at(tier) + 1, "is foreign or held twice");
      }
      const auto count = static_cast<std::int64_t>(node->pages[at(tier)].size());
      held[at(tier)] += count;
      evictable[at(tier)] += node->holds == 0 ? count : 0;
    }
    if (node->ticket != 0) {
      const auto ticket = tickets_.find(node->ticket);
      const bool known = ticket != tickets_.end() &&
                         std::count(ticket->second.nodes.begin(), ticket->second.nodes.end(), node) == 1;
      expect(known, node, "is not of its ticket", node->ticket);
    }
  }
  expect(in_table == table_.size() && nodes.size() == store_.size(), nullptr, in_table, "nodes hang in the tree,",
         table_.size(), "are in the table,", store_.size(), "in the store");
  expect(pins == pins_, nullptr, pins, "pins, counted", pins_);
  expect(seen == used_ && held == held_pages_, nullptr, "marks of held pages differ:", held[0], held[1], "counted",
         held_pages_[0], held_pages_[1]);
  for (Tier tier : kBothTiers) {
    expect(evictable[at(tier)] == evictable_pages_[at(tier)], nullptr, evictable[at(tier)],
           "pages can be evicted, counted", evictable_pages_[at(tier)]);
    const auto offered = static_cast<std::size_t>(std::count_if(
        nodes.begin(), nodes.end(), [&](const Node* node) { return node->standing[at(tier)].offered; }));
    expect(offered == policies_[at(tier)]->size(), nullptr, policies_[at(tier)]->size(), "nodes in the order of L",
           at(tier) + 1, "where", offered, "say so");
    policies_[at(tier)]->check();
  }
  if (history_ != nullptr) {
    history_->check();
  }
  std::size_t held_by_tickets = 0;
  for (const auto& [id, ticket] : tickets_) {
    expect(ticket.acks_missing > 0 && ticket.held->busy > 0, ticket.held, "ticket", id, "holds nothing");
    for (const Node* node : ticket.nodes) {
      expect(node->ticket == id, node, "has ticket", node->ticket, "and stands under", id);
    }
    ++held_by_tickets;
  }
  std::size_t busy = 0;
  for (const Node* node : nodes) {
    busy += node->busy;
  }
  expect(busy == held_by_tickets, nullptr, busy, "nodes are held by", held_by_tickets, "tickets");
}

}  // namespace kvferry
