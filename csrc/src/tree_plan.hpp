// What an insert is going to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

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

}  // namespace kvferry
