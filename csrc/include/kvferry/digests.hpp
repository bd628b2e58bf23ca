// Digests of page items.
#pragma once

#include <cstdint>

#include "kvferry/pool.hpp"

namespace kvferry {

// out[i] is the digest of item (layers[i], pages[i]): xxh3 of 64 bits without a seed, so that any xxh3 library finds
// the same. Several threads when there is much to read (threads: 0 chooses, else that many).
// Checked before anything is read: PageMismatch on lists of unequal length, BadInput on a foreign layer or page.
void digest_items(const Pool& pool, PageList layers, PageList pages, std::uint64_t* out, unsigned threads = 0);

}  // namespace kvferry
