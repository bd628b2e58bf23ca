#include "kvferry/digests.hpp"

#include <string>

#include "kvferry/errors.hpp"
#include "kvferry/workers.hpp"

// The functions themselves and no library: nothing to find at run time. They use what every processor of the kind
// has (SSE2 on x86-64), which already reads faster than memory gives; wider ones were measured to bring nothing.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvferry {

void digest_items(const Pool& pool, PageList layers, PageList pages, std::uint64_t* out, unsigned threads) {
  if (layers.size() != pages.size()) {
    throw PageMismatch(std::to_string(layers.size()) + " layers are given for " + std::to_string(pages.size()) +
                       " pages");
  }
  for (const std::int64_t layer : layers) {
    if (static_cast<std::uint64_t>(layer) >= pool.layers) {
      throw BadInput("layer " + std::to_string(layer) + " is not of this pool of " + std::to_string(pool.layers));
    }
  }
  require_pages(pages, pool.pages);
  const unsigned workers = workers_for(pool.item_bytes * pages.size(), threads);
  in_parts(pages.size(), workers, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      out[i] = XXH3_64bits(pool.item(layers[i], pages[i]), pool.item_bytes);
    }
  });
}

}  // namespace kvferry
