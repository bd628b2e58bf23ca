// The parts that a prefix tree is made of: nodes, and the table that finds them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvferry/residency.hpp"

namespace kvferry {

enum class Tier : std::uint8_t { l1 = 0, l2 = 1 };
inline constexpr std::size_t kTiers = 2;
inline constexpr std::array<Tier, kTiers> kBothTiers = {Tier::l1, Tier::l2};
constexpr std::size_t at(Tier t) { return static_cast<std::size_t>(t); }

// One edge of the tree. It starts on the page grid; only a node without children may end off it.
//
//   tokens   t0 .. t[length-1] (+ one more where the namespace keys by bigrams)
//   pages    |---- 0 ----|---- 1 ----|-- 2 --       the last one may be a valid tail
//   chains   c0          c1          c2             chained hash at the end of each page
struct Node {
  // what a walk reads, in one cache line
  Node* parent = nullptr;
  Node* next_in_bucket = nullptr;
  std::uint64_t key = 0;        // chains[0]
  std::uint64_t chain_end = 0;  // chains.back(), or the namespace's seed in a root
  std::size_t length = 0;       // keys: tokens, or bigrams
  std::vector<std::int32_t> tokens;

  std::vector<std::uint64_t> chains;
  std::array<std::vector<std::int64_t>, kTiers> pages;
  std::vector<std::int8_t> owners;

  Node* first_child = nullptr;
  Node* next_sibling = nullptr;
  Node* previous_sibling = nullptr;
  // lengths of the children shorter than a page, each with how many have it; longest first
  std::vector<std::pair<std::uint32_t, std::uint32_t>> tails;
  std::array<std::uint32_t, kTiers> children_with{};  // children that hold pages of the tier

  // The same for all of its pages: a use that ends inside a node cuts it.
  struct Use {
    std::uint64_t last = 0;  // the tree's clock
    std::uint32_t uses = 0;  // after the one that brought it
  };
  Use use;

  // Of the eviction policy of each tier.
  struct Standing {
    std::uint64_t order = 0;  // its place while it is offered
    std::uint64_t since = 0;
    std::int64_t pages = 0;
    std::int64_t counted = 0;  // pages that could go now, or as soon as those below are gone
    std::uint32_t seen = 0;
    std::uint8_t group = 0;
    std::uint8_t queue = 0;
    bool offered = false;
  };
  std::array<Standing, kTiers> standing;

  std::int64_t ticket = 0;    // the copy in flight that writes this node, 0 for none
  std::uint32_t holds = 0;    // pins and copies in flight of this node and of every node below it
  std::uint32_t pins = 0;     // pins of this node itself
  std::uint32_t busy = 0;     // tickets that hold this node itself
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  Residency state = Residency::absent;
  bool root = false;
  std::uint8_t lookahead = 0;
  const std::string* space = nullptr;  // of a root: its place in the tree's map of namespaces

  std::size_t page_count() const { return chains.size(); }
  bool has(Tier t) const { return !pages[at(t)].empty(); }
  std::int64_t id() const { return static_cast<std::int64_t>(generation) << 32 | slot; }
};

// Owns the nodes. An id names a node for as long as it lives; a later node in its place has another id.
class NodeStore {
 public:
  NodeStore();
  Node* create();
  void destroy(Node* node);
  void rename(Node* node);               // its old id is stale from now on
  Node* find(std::int64_t id) const;     // null for a stale or made-up id
  std::size_t size() const { return live_; }

 private:
  static constexpr std::uint32_t kChunk = 256;
  Node& slot(std::uint32_t i) const { return chunks_[i / kChunk][i % kChunk]; }

  std::vector<std::unique_ptr<Node[]>> chunks_;
  std::vector<std::uint32_t> free_;
  std::size_t live_ = 0;
};

// Nodes by the chained hash of their first page. Equal hashes live side by side: the caller compares.
class NodeTable {
 public:
  NodeTable() : buckets_(1024) {}
  void add(Node* node);
  void remove(Node* node);
  Node* bucket(std::uint64_t key) const { return buckets_[key & (buckets_.size() - 1)]; }
  std::size_t size() const { return size_; }

 private:
  void grow();

  std::vector<Node*> buckets_;
  std::size_t size_ = 0;
};

}  // namespace kvferry
