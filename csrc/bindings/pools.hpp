// numpy arrays as pools: uint8 [pages, item_bytes] or [layers, pages, item_bytes], the items contiguous.
#pragma once

#include <string>

#include "bind.hpp"
#include "kvferry/errors.hpp"
#include "kvferry/pool.hpp"

namespace kvferry::bind {

// Strided: a layer of a page-first pool is a view like any other.
template <typename T, std::size_t Dimensions>
using Bytes = nb::ndarray<T, nb::ndim<Dimensions>, nb::device::cpu>;

// The stride of an axis; BadInput where its items would overlap (a negative or broadcast axis).
inline std::size_t stride_bytes(std::int64_t stride, std::size_t length, std::size_t item_bytes) {
  if (length > 1 && stride < static_cast<std::int64_t>(item_bytes)) {
    throw BadInput("items of " + std::to_string(item_bytes) + " bytes at a stride of " + std::to_string(stride));
  }
  return length > 1 ? static_cast<std::size_t>(stride) : item_bytes;
}

template <std::size_t Dimensions, typename Byte, typename Array>
BasicPool<Byte> pool_of(const Array& array) {
  constexpr std::size_t page_axis = Dimensions - 2, byte_axis = Dimensions - 1;
  const std::size_t item_bytes = array.shape(byte_axis);
  if (item_bytes == 0) {
    throw BadInput("an item has 0 bytes");
  }
  if (array.size() == 0) {  // strides of nothing mean nothing
    return {.layers = Dimensions == 3 ? array.shape(0) : 1, .pages = array.shape(page_axis), .item_bytes = item_bytes};
  }
  if (item_bytes > 1 && array.stride(byte_axis) != 1) {
    throw BadInput("the bytes of an item are " + std::to_string(array.stride(byte_axis)) + " apart");
  }
  BasicPool<Byte> pool;
  pool.base = reinterpret_cast<Byte*>(array.data());
  pool.pages = array.shape(page_axis);
  pool.item_bytes = item_bytes;
  pool.page_stride = stride_bytes(array.stride(page_axis), pool.pages, item_bytes);
  if constexpr (Dimensions == 3) {
    pool.layers = array.shape(0);
    pool.layer_stride = stride_bytes(array.stride(0), pool.layers, item_bytes);
  }
  return pool;
}

}  // namespace kvferry::bind
