#include "kvferry/copies.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "kvferry/errors.hpp"
#include "kvferry/workers.hpp"
#include "streaming.hpp"

namespace kvferry {
namespace {

constexpr std::size_t kUnknownCacheBytes = std::size_t{32} << 20;

std::uintptr_t address(const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); }

// One past the last byte of the pool's first layer.
const std::byte* end_of(const Pool& pool) {
  return pool.pages == 0 ? pool.base : pool.item(0, static_cast<std::int64_t>(pool.pages) - 1) + pool.item_bytes;
}

void require_once(PageList pages, std::size_t of) {
  std::vector<bool> seen(of);
  for (const std::int64_t page : pages) {
    const auto at = static_cast<std::size_t>(page);
    if (seen[at]) {
      throw BadInput("destination page " + std::to_string(page) + " stands twice");
    }
    seen[at] = true;
  }
}

// Source and destination may be one pool (pages that move), or views into one: no byte may be both read and
// written, whatever the strides, since the copies have no order.
void require_disjoint(const Pool& source, PageList pages, const WritablePool& destination, PageList to) {
  if (address(end_of(source)) <= address(destination.base) ||
      address(end_of(destination)) <= address(source.base)) {
    return;
  }
  const std::size_t bytes = source.item_bytes;
  std::vector<std::uintptr_t> read(pages.size());
  std::transform(pages.begin(), pages.end(), read.begin(),
                 [&](std::int64_t page) { return address(source.item(0, page)); });
  std::sort(read.begin(), read.end());
  for (const std::int64_t page : to) {
    const std::uintptr_t written = address(destination.item(0, page));
    // the first item that ends after the start of the written one
    const auto at = std::upper_bound(read.begin(), read.end(), written, [&](std::uintptr_t w, std::uintptr_t r) {
      return w < r + bytes;
    });
    if (at != read.end() && *at < written + bytes) {
      throw BadInput("page " + std::to_string(page) + " is both read and written");
    }
  }
}

}  // namespace

std::size_t streaming_bytes() {
  static const std::size_t bytes = [] {
    // sysconf is no use: on some processors it adds up the caches of all their parts
    for (const char* const name : {"index3", "index2"}) {
      std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/") + name + "/size");
      std::size_t size = 0;
      char unit = ' ';
      if (file >> size >> unit && size > 0) {
        return unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size;
      }
    }
    return kUnknownCacheBytes;
  }();
  return bytes;
}

void copy_pages(const Pool& source, PageList pages, const WritablePool& destination, PageList to,
                unsigned threads) {
  if (pages.size() != to.size()) {
    throw PageMismatch("source has " + std::to_string(pages.size()) + " pages, destination " +
                       std::to_string(to.size()));
  }
  if (source.item_bytes != destination.item_bytes) {
    throw PageMismatch("source items have " + std::to_string(source.item_bytes) + " bytes, destination items " +
                       std::to_string(destination.item_bytes));
  }
  require_pages(pages, source.pages);
  require_pages(to, destination.pages);
  require_once(to, destination.pages);
  require_disjoint(source, pages, destination, to);

  const std::size_t bytes = source.item_bytes;
  const std::size_t total = bytes * pages.size();
  const bool streaming = total > streaming_bytes();
  in_parts(pages.size(), workers_for(total, threads), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::byte* const from = source.item(0, pages[i]);
      std::byte* const into = destination.item(0, to[i]);
      if (streaming) {
        stream_copy(into, from, bytes, i + 1 < end ? source.item(0, pages[i + 1]) : from);
      } else {
        std::memcpy(into, from, bytes);
      }
    }
    if (streaming) {
      stream_fence();
    }
  });
}

}  // namespace kvferry
