#include "kvferry/size_index.hpp"

#include <algorithm>

namespace kvferry {

std::size_t SizeIndex::block_for(std::uint64_t key) const {
  return static_cast<std::size_t>(std::lower_bound(greatest_.begin(), greatest_.end(), key) - greatest_.begin());
}

void SizeIndex::split(std::size_t at) {
  auto upper = std::make_unique<Block>();
  Block& lower = *blocks_[at];
  upper->count = lower.count / 2;
  lower.count -= upper->count;
  std::copy_n(lower.keys + lower.count, upper->count, upper->keys);
  auto offset = static_cast<std::ptrdiff_t>(at);
  greatest_.insert(greatest_.begin() + offset, lower.keys[lower.count - 1]);
  blocks_.insert(blocks_.begin() + offset + 1, std::move(upper));
}

void SizeIndex::insert(std::uint64_t key) {
  std::size_t at = block_for(key);
  if (at == blocks_.size()) {
    if (blocks_.empty()) {
      blocks_.push_back(std::make_unique<Block>());
      greatest_.push_back(key);
    } else {
      --at;
    }
  }
  if (blocks_[at]->count == kCapacity) {
    split(at);
    if (key > greatest_[at]) {
      ++at;
    }
  }
  Block& block = *blocks_[at];
  std::uint64_t* end = block.keys + block.count;
  std::uint64_t* place = std::lower_bound(block.keys, end, key);
  std::copy_backward(place, end, end + 1);
  *place = key;
  ++block.count;
  greatest_[at] = block.keys[block.count - 1];
  ++size_;
}

bool SizeIndex::erase(std::uint64_t key) {
  std::size_t at = block_for(key);
  if (at == blocks_.size()) {
    return false;
  }
  Block& block = *blocks_[at];
  std::uint64_t* end = block.keys + block.count;
  std::uint64_t* place = std::lower_bound(block.keys, end, key);
  if (place == end || *place != key) {
    return false;
  }
  std::copy(place + 1, end, place);
  --block.count;
  --size_;
  auto offset = static_cast<std::ptrdiff_t>(at);
  if (block.count == 0) {
    blocks_.erase(blocks_.begin() + offset);
    greatest_.erase(greatest_.begin() + offset);
    return true;
  }
  greatest_[at] = block.keys[block.count - 1];
  // Keep blocks from thinning out: a small one goes into the next.
  if (block.count < kCapacity / 4 && at + 1 < blocks_.size() && blocks_[at + 1]->count < kCapacity / 2) {
    Block& next = *blocks_[at + 1];
    std::copy_backward(next.keys, next.keys + next.count, next.keys + next.count + block.count);
    std::copy_n(block.keys, block.count, next.keys);
    next.count += block.count;
    blocks_.erase(blocks_.begin() + offset);
    greatest_.erase(greatest_.begin() + offset);
  }
  return true;
}

std::optional<std::uint64_t> SizeIndex::at_least(std::uint64_t key) const {
  std::size_t at = block_for(key);
  if (at == blocks_.size()) {
    return std::nullopt;
  }
  const Block& block = *blocks_[at];
  return *std::lower_bound(block.keys, block.keys + block.count, key);
}

}  // namespace kvferry
