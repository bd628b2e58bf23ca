#include "kvferry/tree_node.hpp"

namespace kvferry {

NodeStore::NodeStore() {
  create();  // slot 0 is never handed out, so that id 0 is no node
  live_ = 0;
}

Node* NodeStore::create() {
  if (free_.empty()) {
    const auto first = static_cast<std::uint32_t>(chunks_.size()) * kChunk;
    chunks_.push_back(std::make_unique<Node[]>(kChunk));
    for (std::uint32_t i = kChunk; i-- > 0;) {
      slot(first + i).slot = first + i;
      free_.push_back(first + i);
    }
  }
  Node* node = &slot(free_.back());
  free_.pop_back();
  rename(node);
  ++live_;
  return node;
}

void NodeStore::destroy(Node* node) {
  const std::uint32_t slot = node->slot, generation = node->generation;
  *node = Node{};
  node->slot = slot;
  node->generation = generation + 1;  // even: free
  free_.push_back(slot);
  --live_;
}

void NodeStore::rename(Node* node) {
  // odd while the node lives; 31 bits, so that an id stays positive
  node->generation = ((node->generation + 1) | 1) & 0x7fffffff;
}

Node* NodeStore::find(std::int64_t id) const {
  const auto slot_number = static_cast<std::uint32_t>(id);
  const auto generation = static_cast<std::uint64_t>(id) >> 32;
  if (id <= 0 || slot_number == 0 || slot_number / kChunk >= chunks_.size() || (generation & 1) == 0) {
    return nullptr;
  }
  Node& node = slot(slot_number);
  return node.generation == generation ? &node : nullptr;
}

void NodeTable::add(Node* node) {
  if (size_ >= buckets_.size()) {
    grow();
  }
  Node*& head = buckets_[node->key & (buckets_.size() - 1)];
  node->next_in_bucket = head;
  head = node;
  ++size_;
}

void NodeTable::remove(Node* node) {
  Node** place = &buckets_[node->key & (buckets_.size() - 1)];
  while (*place != node) {
    place = &(*place)->next_in_bucket;
  }
  *place = node->next_in_bucket;
  node->next_in_bucket = nullptr;
  --size_;
}

void NodeTable::grow() {
  std::vector<Node*> old(buckets_.size() * 2);
  old.swap(buckets_);
  for (Node* node : old) {
    while (node != nullptr) {
      Node* next = node->next_in_bucket;
      Node*& head = buckets_[node->key & (buckets_.size() - 1)];
      node->next_in_bucket = head;
      head = node;
      node = next;
    }
  }
}

}  // namespace kvferry
