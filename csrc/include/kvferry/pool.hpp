// Views of a buffer's pool: layers x pages x item bytes, each layer and page at its own stride.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

// Borrowed memory; Byte is `const std::byte` for a pool that is only read.
template <typename Byte>
struct BasicPool {
  Byte* base = nullptr;
  std::size_t layers = 1;
  std::size_t pages = 0;
  std::size_t item_bytes = 0;
  std::size_t layer_stride = 0;  // bytes between an item and that of the next layer
  std::size_t page_stride = 0;   // bytes between an item and that of the next page

  Byte* item(std::int64_t layer, std::int64_t page) const {
    return base + static_cast<std::size_t>(layer) * layer_stride +
           static_cast<std::size_t>(page) * page_stride;
  }
  operator BasicPool<const std::byte>() const {
    return {base, layers, pages, item_bytes, layer_stride, page_stride};
  }
};

using Pool = BasicPool<const std::byte>;
using WritablePool = BasicPool<std::byte>;
using PageList = std::span<const std::int64_t>;

// BadInput, naming the page, when one is not of a pool with that many.
void require_pages(PageList pages, std::size_t of);

}  // namespace kvferry
