#include "page_runs.hpp"

#include <algorithm>
#include <string>

namespace kvferry {

bool to_runs(std::span<const Page> pages, std::int64_t limit, Runs& runs) {
  runs.clear();
  for (std::size_t i = 0; i < pages.size();) {
    Page first = pages[i];
    if (first < 0 || first >= limit) {
      return false;
    }
    std::size_t most = std::min(pages.size() - i, static_cast<std::size_t>(limit - first));
    std::size_t n = 1;
    // sixteen at a time, which the compiler turns into vector code
    for (; n + 16 <= most; n += 16) {
      Page differs = 0;
      for (std::size_t k = 0; k < 16; ++k) {
        differs |= pages[i + n + k] ^ (first + static_cast<Page>(n + k));
      }
      if (differs != 0) {
        break;
      }
    }
    while (n < most && pages[i + n] == first + static_cast<Page>(n)) {
      ++n;
    }
    runs.push_back({static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(n)});
    i += n;
  }
  return true;
}

std::int64_t total(std::span<const Run> runs) {
  std::int64_t sum = 0;
  for (const Run& run : runs) {
    sum += run.count;
  }
  return sum;
}

std::string summary(std::span<const Page> pages) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < pages.size();) {
    std::size_t n = 1;
    while (i + n < pages.size() && pages[i + n] == pages[i + n - 1] + 1) {
      ++n;
    }
    std::string text = std::to_string(pages[i]);
    if (n > 1) {
      text += ".." + std::to_string(pages[i + n - 1]);
    }
    runs.push_back(std::move(text));
    i += n;
  }
  std::string text = "[";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs.size() > 6 && i == 3) {
      text += ", ...";
      i = runs.size() - 2;
    }
    text += (i == 0 ? "" : ", ") + runs[i];
  }
  return text + "] (" + std::to_string(pages.size()) + ")";
}

}  // namespace kvferry
