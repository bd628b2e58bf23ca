// What the binding files share: their entry points and cheap conversions between numpy and C++.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace nb = nanobind;

// Each is defined in the file of its name.
void bind_extents(nb::module_& m);
void bind_lanes(nb::module_& m);
void bind_plans(nb::module_& m);
void bind_tree(nb::module_& m);
void bind_copies(nb::module_& m);
void bind_digests(nb::module_& m);

namespace kvferry::bind {

// A contiguous one-dimensional numpy array on the CPU; another dtype is a TypeError, not a silent copy, where
// the argument is declared with nb::arg(...).noconvert().
using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int8s = nb::ndarray<const std::int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T, typename... Ts>
std::span<const T> view(const nb::ndarray<const T, Ts...>& array) {
  return {array.data(), array.size()};
}

// Hand a vector over to numpy without a copy of its elements.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owned->data();
  std::size_t size = owned->size();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner);
}

}  // namespace kvferry::bind
