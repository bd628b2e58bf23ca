// Copies between page lists in host memory.
#pragma once

#include <cstdint>

#include "kvferry/pool.hpp"

namespace kvferry {

// Item pages[i] of `source` to item to[i] of `destination`, one layer each (layer 0 of both pools).
//
// Several threads when there is much to copy (threads: 0 chooses, else that many), and stores that bypass
// the caches once the copy is larger than they are: it would only evict what others need.
// All is checked before the first byte moves:
//   PageMismatch   lists of unequal length, items of unequal size
//   BadInput       a foreign page, a destination page that stands twice, a page that is both read and written
void copy_pages(const Pool& source, PageList pages, const WritablePool& destination, PageList to,
                unsigned threads = 0);

// What a copy has to pass to bypass the caches: the size of the last-level cache.
std::size_t streaming_bytes();

}  // namespace kvferry
