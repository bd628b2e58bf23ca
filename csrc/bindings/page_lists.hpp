// Page lists and runs as numpy arrays.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "kvferry/extents.hpp"

namespace kvferry::bind {

inline nb::object page_array(std::span<const Run> runs) {
  std::size_t size = 0;
  for (const Run& run : runs) {
    size += run.count;
  }
  Page* out = nullptr;
  nb::object array = new_int64s(size, out);
  for (const Run& run : runs) {
    std::iota(out, out + run.count, static_cast<Page>(run.first));
    out += run.count;
  }
  return array;
}

inline nb::object page_array(const std::vector<Page>& pages) {
  Page* out = nullptr;
  nb::object array = new_int64s(pages.size(), out);
  std::copy(pages.begin(), pages.end(), out);
  return array;
}

// (first pages, counts)
inline nb::object run_arrays(std::span<const Run> runs) {
  Page* first = nullptr;
  Page* count = nullptr;
  nb::object firsts = new_int64s(runs.size(), first);
  nb::object counts = new_int64s(runs.size(), count);
  for (const Run& run : runs) {
    *first++ = run.first;
    *count++ = run.count;
  }
  return nb::make_tuple(std::move(firsts), std::move(counts));
}

}  // namespace kvferry::bind
