// An ordered set of extents by (length, first page).
//
// Keys lie sorted in blocks of at most kCapacity; a directory holds the greatest key of each block. With E extents
// a search costs O(log E), a change moves half a block on average. Chosen over a tree of nodes because a block is a
// few cache lines that memmove shifts at once, and over a list for each length because equal lengths stay in the
// order of their pages, which keeps the free room together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry {

class SizeIndex {
 public:
  static std::uint64_t key(std::uint32_t length, std::uint32_t first) {
    return static_cast<std::uint64_t>(length) << 32 | first;
  }
  static std::uint32_t length(std::uint64_t key) { return static_cast<std::uint32_t>(key >> 32); }
  static std::uint32_t first(std::uint64_t key) { return static_cast<std::uint32_t>(key); }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  // The key must not be there yet.
  void insert(std::uint64_t key);
  // False when the key is not there.
  bool erase(std::uint64_t key);
  // The smallest key that is not less.
  std::optional<std::uint64_t> at_least(std::uint64_t key) const;
  // The greatest key; the index must not be empty.
  std::uint64_t greatest() const { return greatest_.back(); }

  template <typename Visit>
  void each(Visit&& visit) const {
    for (const auto& block : blocks_) {
      for (std::size_t i = 0; i < block->count; ++i) {
        visit(block->keys[i]);
      }
    }
  }

 private:
  static constexpr std::size_t kCapacity = 128;

  struct Block {
    std::size_t count = 0;
    std::uint64_t keys[kCapacity];
  };

  // Number of the first block whose greatest key is not less; the number of blocks when there is none.
  std::size_t block_for(std::uint64_t key) const;
  void split(std::size_t at);

  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::uint64_t> greatest_;
  std::size_t size_ = 0;
};

}  // namespace kvferry
