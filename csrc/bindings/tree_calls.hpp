// What the binding files of the prefix tree share: arguments, results and the lock.
#pragma once

#include <algorithm>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "arrays.hpp"
#include "bind.hpp"
#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace kvferry::bind {

using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;

inline Tokens tokens_of(const AnyArray& array) {
  if (array.ndim() != 1) {
    throw BadInput("tokens have one dimension, not " + std::to_string(array.ndim()));
  }
  if (array.size() > 1 && array.stride(0) != 1) {
    throw BadInput("tokens are contiguous, not " + std::to_string(array.stride(0)) + " apart");
  }
  if (array.dtype() == nb::dtype<std::int64_t>()) {
    return Tokens(std::span(static_cast<const std::int64_t*>(array.data()), array.size()));
  }
  if (array.dtype() == nb::dtype<std::int32_t>()) {
    return Tokens(std::span(static_cast<const std::int32_t*>(array.data()), array.size()));
  }
  throw BadInput("tokens are int64 or int32, not another type");
}

// None: every page is of lane 0.
inline Input<std::int8_t> owners_of(nb::handle owners) {
  return owners.is_none() ? Input<std::int8_t>{} : int8s(owners, "owners");
}

inline nb::object to_array(std::span<const std::int64_t> values) {
  std::int64_t* data = nullptr;
  nb::object array = new_int64s(values.size(), data);
  std::copy(values.begin(), values.end(), data);
  return array;
}

// The tree with its lock: long calls run without the GIL, and then another thread may come.
struct SharedTree {
  explicit SharedTree(const TreeShape& shape) : tree(shape) {}
  PrefixTree tree;
  std::mutex mutex;
};

// Below this many tokens a call is shorter than what it may cost to get the GIL back.
constexpr std::size_t kLongTokens = 8192;
constexpr std::int64_t kLongPages = 1024;

template <typename Work>
auto locked(SharedTree& shared, bool is_long, Work&& work) {
  std::optional<nb::gil_scoped_release> release;
  if (is_long) {
    release.emplace();
  }
  const std::lock_guard lock(shared.mutex);  // let go of before the GIL is asked for: no deadlock
  return work(shared.tree);
}

// In tree_results.cpp and tree_tickets.cpp.
void bind_tree_results(nb::module_& m);
void bind_tree_tickets(nb::class_<SharedTree>& tree);

}  // namespace kvferry::bind
