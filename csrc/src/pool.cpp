#include "kvferry/pool.hpp"

#include <string>

#include "kvferry/errors.hpp"

namespace kvferry {

void require_pages(PageList pages, std::size_t of) {
  for (const std::int64_t page : pages) {
    // one comparison also for negative numbers
    if (static_cast<std::uint64_t>(page) >= of) {
      throw BadInput("page " + std::to_string(page) + " is not of this pool of " + std::to_string(of));
    }
  }
}

}  // namespace kvferry
