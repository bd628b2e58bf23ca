// The prefix (radix) tree: which pages hold the KV of which prompt prefix, in which tier.
//
// It stores page numbers and never touches a page. Pages that a call returns belong to the caller again;
// pages that it takes belong to the tree. Not thread-safe. Every error leaves the tree as it was.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvferry/hash.hpp"
#include "kvferry/policy.hpp"
#include "kvferry/reuse.hpp"
#include "kvferry/tree_node.hpp"

namespace kvferry {

// A draft row at position p depends on token p + 1, which a key over the tokens up to p does not hold.
// recompute_last_page gives up the last matched page; one_token_further is exact, in a bigram namespace.
enum class Draft : std::uint8_t { none, recompute_last_page, one_token_further };

struct TreeShape {
  std::size_t page_size = 64;
  std::int64_t l1_pages = 0;  // pages that exist in each tier: 0 .. n-1
  std::int64_t l2_pages = 0;
  int lanes = 1;       // owners are 0 .. lanes-1
  int hash_bits = 64;  // fewer make page hashes collide: for tests
  std::array<std::string, kTiers> policies = {"lhd", "lhd"};  // of kPolicies
};

struct MatchOptions {
  bool floor = false;  // whole pages only: for a new scheduling decision
  Draft draft = Draft::none;
  bool touch = true;  // counts as a use, and cuts the node inside which it ends
  bool pin = false;   // pins `node`
};

struct Match {
  std::int64_t tokens = 0;      // readable prefix: L1, then L2
  std::int64_t l1_tokens = 0;   // the part of it that is readable in L1
  std::int64_t known_tokens = 0;  // the prefix that an insert would find, in whatever state
  std::int64_t node = 0;        // the last node of the readable prefix; 0: nothing matched
  std::vector<std::int64_t> pages;  // L1 pages of l1_tokens
};

struct Inserted {
  std::int64_t node = 0;             // the node that now ends the prompt (0 when nothing was stored)
  std::int64_t tokens = 0;           // of the prompt that the tree now knows
  std::int64_t known_tokens = 0;     // that it knew before
  std::vector<std::int64_t> duplicates;  // page positions that the tree did not take: the caller's to free
  std::vector<std::int64_t> freed_l2;    // L2 pages that a grown tail made stale
};

struct Reserved {
  std::int64_t node = 0;
  std::int64_t ticket = 0;
};

struct Settled {
  std::vector<std::int64_t> nodes;  // every fragment of the ticket; empty while acknowledgements are missing
  std::vector<std::int64_t> pages;  // cancelled: the pages that had been taken for the copy
};

struct Freed {
  std::vector<std::int64_t> l1;
  std::vector<std::int64_t> l2;
};

struct NodeInfo {
  std::int64_t id = 0, parent = 0, start = 0, tokens = 0;
  Residency state = Residency::absent;
  std::vector<std::int64_t> l1_pages, l2_pages;
  std::vector<std::int8_t> owners;
  std::uint32_t pins = 0, holds = 0;
  std::int64_t ticket = 0;
};

struct TreeStats {
  std::int64_t nodes = 0, namespaces = 0, tickets = 0, pins = 0;
  std::int64_t l1_pages = 0, l2_pages = 0;                      // that the tree holds
  std::int64_t evictable_l1_pages = 0, evictable_l2_pages = 0;  // that an eviction could return now
};

class PrefixTree {
 public:
  explicit PrefixTree(const TreeShape& shape);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  const TreeShape& shape() const { return shape_; }
  std::size_t pages_for(std::size_t tokens) const { return (tokens + shape_.page_size - 1) / shape_.page_size; }

  Match match(const Namespace& space, const Tokens& tokens, const MatchOptions& options);
  // `pages` and `owners` hold an entry for each page of the prompt; empty owners mean lane 0.
  Inserted insert(const Namespace& space, const Tokens& tokens, std::span<const std::int64_t> pages,
                  std::span<const std::int8_t> owners, bool pin);

  void pin(std::int64_t node);
  void unpin(std::int64_t node);
  // Cuts a node after `tokens` of its tokens; the id of the new front part. The back part keeps the id.
  std::int64_t split(std::int64_t node, std::int64_t tokens);

  // Backup, in tree_copies.cpp: reserve before the forward, or for a node that is in L1.
  Reserved reserve(const Namespace& space, const Tokens& tokens, std::int64_t first_page,
                   std::span<const std::int64_t> l2_pages, std::span<const std::int8_t> owners, int acks);
  std::int64_t begin_backup(std::int64_t node, std::span<const std::int64_t> l2_pages, int acks);
  // Loads every L2-only node of the path down to `node`: one page for each of load_owners(node).
  std::vector<std::int8_t> load_owners(std::int64_t node) const;
  std::vector<std::int64_t> load_pages(std::int64_t node) const;  // their L2 pages, in the same order
  std::int64_t begin_load(std::int64_t node, std::span<const std::int64_t> l1_pages, int acks);
  Settled acknowledge(std::int64_t ticket);
  Settled cancel(std::int64_t ticket);

  // Eviction, in tree_evict.cpp. At least `pages` pages (or, by owner, wanted[lane] of each lane) where the
  // evictable nodes have them.
  std::vector<std::int64_t> evict(Tier tier, std::int64_t pages);
  std::vector<std::int64_t> evict_owners(Tier tier, std::span<const std::int64_t> wanted);
  // The nodes that evict_owners would take pages of, in its order. Nothing has changed when it returns.
  std::vector<std::int64_t> victims(Tier tier, std::span<const std::int64_t> wanted);
  Freed clear(const Namespace& space);

  NodeInfo node(std::int64_t id) const;
  std::vector<std::int64_t> path(std::int64_t id) const;  // from the top down to `id`
  TreeStats stats() const;
  void check_integrity() const;  // in tree_check.cpp

 private:
  struct Step {
    Node* node;
    std::size_t start;  // in keys from the start of the prompt
    std::size_t keys;   // of the node that match
  };
  struct Walk {
    std::vector<Step>& steps;
    Node* top;           // null: nobody has used the namespace
    std::size_t keys;    // of the prompt
    std::size_t matched;
    bool inside() const { return !steps.empty() && steps.back().keys < steps.back().node->length; }
  };
  struct Ticket {
    Event kind;
    int acks_missing;
    Node* held;  // its deepest node: stays so across splits
    std::vector<Node*> nodes;
  };
  struct Demand;  // of an eviction

  std::uint64_t key_of(std::uint64_t before, const Tokens& tokens, std::size_t at, std::size_t count) const;
  Node* find_child(Node* parent, const Tokens& tokens, std::size_t at, std::size_t keys) const;
  Walk walk(const Namespace& space, const Tokens& tokens) const;
  Step* last_before(const Walk& walk, std::size_t keys) const;

  // insert, in tree_insert.cpp
  struct Plan;
  void plan_known(const Walk& walk, const Tokens& tokens, std::span<const std::int64_t> pages,
                  std::span<const std::int8_t> owners, Plan& plan) const;
  void plan_rest(const Walk& walk, const Tokens& tokens, std::span<const std::int64_t> pages, Plan& plan) const;
  Node* holder_at(const Node* parent, const Tokens& tokens, std::size_t at, std::size_t keys,
                  std::int64_t page) const;
  Node* parent_at_grid(const Walk& walk, const Namespace& space);
  Node* hang(Node* parent, std::vector<std::int32_t>&& run, std::span<const std::int8_t> owners,
             std::size_t first_page);
  void write(Node* node, std::uint64_t before, std::vector<std::int32_t>&& run) const;
  Node* grow(Node* node, std::span<const std::int64_t> pages, std::span<const std::int8_t> owners,
             std::vector<std::int32_t>&& run, std::size_t first_page, Inserted& result);

  Node* require(std::int64_t id) const;
  void require_pages(Tier tier, std::span<const std::int64_t> pages, std::size_t wanted) const;
  void require_unused(Tier tier, std::span<const std::int64_t> pages) const;
  void require_owners(std::span<const std::int8_t> owners, std::size_t wanted) const;
  void require_acks(int acks) const;

  void give(Node* node, Tier tier, std::span<const std::int64_t> pages);
  std::vector<std::int64_t> take(Node* node, Tier tier);
  void settle(Node* node);  // offered to the policies if and only if it may go, and nothing below it has to first
  void settle(Node* node, Tier tier);
  void withdraw(Node* node, Tier tier);  // before its pages change; settle() afterwards
  void hold(Node* node);
  void release(Node* node);
  void touch(const Walk& walk);  // one use of every page that the walk found
  template <typename Visit>
  void sample(const Node* node, std::size_t first_page, std::size_t pages, Visit&& visit) const;
  void cut_behind(Step& step, std::size_t keys);
  void tick();
  void refresh(Node* node);                         // used as part of an insert: newer, but not once more
  void arrive(Node* node, std::size_t first_page);  // its pages are new, or come back
  Node* cut(Node* node, std::size_t page);
  void adopt(Node* child, Node* parent);
  void disown(Node* child);
  void count_tail(Node* parent, std::size_t length, int by);
  void prune(Node* node);
  std::int64_t open_ticket(Event kind, int acks, Node* held, std::vector<Node*>&& nodes);
  std::vector<Node*> loadable(Node* node) const;

  void drop(Node* node, Tier tier, std::size_t keep, std::vector<std::int64_t>& out);
  std::size_t surplus(const Node* node, const Demand& demand) const;
  Demand demand_of(std::span<const std::int64_t> wanted) const;
  template <typename Go>
  void choose(Tier tier, Demand demand, Go&& go);

  void check_node(const Node* node) const;
  void check_children(const Node* node) const;

  TreeShape shape_;
  std::uint64_t hash_mask_;
  NodeStore store_;
  NodeTable table_;
  Clock clock_;
  std::unique_ptr<ReuseHistory> history_;  // null: neither policy learns
  std::array<std::unique_ptr<Policy>, kTiers> policies_;
  std::array<std::int64_t, kTiers> evictable_pages_{};
  std::array<std::vector<std::uint8_t>, kTiers> used_;  // 1 for each page that the tree holds
  std::array<std::int64_t, kTiers> held_pages_{};
  std::unordered_map<std::string, Node*> tops_;
  std::unordered_map<std::int64_t, Ticket> tickets_;
  std::int64_t last_ticket_ = 0;
  std::int64_t pins_ = 0;
  mutable std::vector<Step> steps_;     // of the last walk, kept for its memory
  std::vector<std::uint64_t> sampled_;  // of the last touch, likewise
};

}  // namespace kvferry
