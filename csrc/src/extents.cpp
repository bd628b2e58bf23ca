// The extents themselves and what is taken out of them.
#include "kvferry/extents.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "kvferry/errors.hpp"

namespace kvferry {

PageExtents::PageExtents(std::int64_t pages_per_lane, std::int64_t lanes, std::string label, Tail tail)
    : pages_(pages_per_lane), label_(std::move(label)), tail_(tail) {
  if (pages_per_lane < 1) {
    throw BadInput("a lane needs at least one page, not " + std::to_string(pages_per_lane));
  }
  if (lanes < 1 || lanes > std::numeric_limits<std::int8_t>::max()) {
    throw BadInput("there are 1 to 127 lanes, not " + std::to_string(lanes));
  }
  if (pages_per_lane > std::numeric_limits<std::int32_t>::max() / lanes) {
    throw BadInput("more pages than can be numbered: " + std::to_string(pages_per_lane));
  }
  auto all = static_cast<std::size_t>(pages_per_lane * lanes);
  state_.assign(all, kFree);
  length_at_first_.assign(all, 0);
  length_at_last_.assign(all, 0);
  sizes_.resize(static_cast<std::size_t>(lanes));
  free_.assign(static_cast<std::size_t>(lanes), pages_per_lane);
  auto count = static_cast<std::uint32_t>(pages_per_lane);
  for (std::uint32_t lane = 0; lane < sizes_.size(); ++lane) {
    add_extent(lane, lane * count, count);
  }
}

std::int64_t PageExtents::free_pages() const { return std::accumulate(free_.begin(), free_.end(), std::int64_t{0}); }

std::int64_t PageExtents::largest_extent(std::size_t lane) const {
  return sizes_[lane].empty() ? 0 : SizeIndex::length(sizes_[lane].greatest());
}

std::int64_t PageExtents::extents() const {
  std::size_t sum = 0;
  for (const SizeIndex& index : sizes_) {
    sum += index.size();
  }
  return static_cast<std::int64_t>(sum);
}

void PageExtents::add_extent(std::size_t lane, std::uint32_t first, std::uint32_t count) {
  length_at_first_[first] = count;
  length_at_last_[first + count - 1] = count;
  sizes_[lane].insert(SizeIndex::key(count, first));
}

void PageExtents::take(std::size_t lane, std::uint64_t key, std::uint32_t count) {
  std::uint32_t first = SizeIndex::first(key);
  std::uint32_t length = SizeIndex::length(key);
  sizes_[lane].erase(key);
  if (count < length) {
    add_extent(lane, first + count, length - count);
  }
  std::memset(state_.data() + first, kTaken, count);
}

bool PageExtents::allocate(std::size_t lane, std::int64_t count, Runs& runs) {
  runs.clear();
  if (count < 0) {
    throw BadInput("cannot allocate " + std::to_string(count) + " pages");
  }
  if (count > free_[lane]) {
    return false;
  }
  SizeIndex& sizes = sizes_[lane];
  free_[lane] -= count;
  auto left = static_cast<std::uint32_t>(count);
  while (left > 0) {
    // The smallest extent that holds what is left, the lowest of equals; else the largest, the highest of equals.
    std::uint64_t best = sizes.greatest();
    if (left <= SizeIndex::length(best) && (runs.empty() || tail_ == Tail::kBestFit)) {
      best = *sizes.at_least(SizeIndex::key(left, 0));
    }
    std::uint32_t part = std::min(left, SizeIndex::length(best));
    runs.push_back({SizeIndex::first(best), part});
    take(lane, best, part);
    left -= part;
  }
  return true;
}

std::vector<std::int64_t> PageExtents::demand(std::span<const std::int8_t> owners) const {
  std::int64_t counts[256] = {};
  for (std::int8_t owner : owners) {
    ++counts[static_cast<std::uint8_t>(owner)];
  }
  std::vector<std::int64_t> wanted(counts, counts + sizes_.size());
  if (std::accumulate(wanted.begin(), wanted.end(), std::int64_t{0}) != static_cast<std::int64_t>(owners.size())) {
    for (std::size_t i = 0; i < owners.size(); ++i) {
      if (owners[i] < 0 || owners[i] >= lanes()) {
        throw BadInput("owner " + std::to_string(owners[i]) + " of page " + std::to_string(i) + " is outside 0.." +
                       std::to_string(lanes()));
      }
    }
  }
  return wanted;
}

std::vector<std::int64_t> PageExtents::deficits(std::span<const std::int8_t> owners) const {
  std::vector<std::int64_t> wanted = demand(owners);
  for (std::size_t lane = 0; lane < wanted.size(); ++lane) {
    wanted[lane] = std::max<std::int64_t>(0, wanted[lane] - free_[lane]);
  }
  return wanted;
}

bool PageExtents::allocate_owned(std::span<const std::int8_t> owners, Page* pages) {
  std::vector<std::int64_t> wanted = demand(owners);
  for (std::size_t lane = 0; lane < wanted.size(); ++lane) {
    if (wanted[lane] > free_[lane]) {
      return false;
    }
  }
  struct Cursor {
    Page next = 0;
    std::uint32_t left = 0;
    std::size_t run = 0;
  };
  std::vector<Runs> runs(wanted.size());
  std::vector<Cursor> cursors(wanted.size());
  for (std::size_t lane = 0; lane < wanted.size(); ++lane) {
    allocate(lane, wanted[lane], runs[lane]);
    std::sort(runs[lane].begin(), runs[lane].end(), [](Run a, Run b) { return a.first < b.first; });
  }
  for (std::size_t i = 0; i < owners.size(); ++i) {
    auto lane = static_cast<std::size_t>(owners[i]);
    Cursor& at = cursors[lane];
    if (at.left == 0) {
      const Run& run = runs[lane][at.run++];
      at.next = run.first;
      at.left = run.count;
    }
    pages[i] = at.next++;
    --at.left;
  }
  return true;
}

std::vector<Page> PageExtents::free_slots() const {
  std::vector<Page> pages;
  pages.reserve(static_cast<std::size_t>(free_pages()));
  for (std::size_t page = 0; page < state_.size(); ++page) {
    if (state_[page] == kFree) {
      pages.push_back(static_cast<Page>(page));
    }
  }
  return pages;
}

Runs PageExtents::free_extents() const {
  Runs runs;
  for (const SizeIndex& sizes : sizes_) {
    sizes.each([&](std::uint64_t key) { runs.push_back({SizeIndex::first(key), SizeIndex::length(key)}); });
  }
  std::sort(runs.begin(), runs.end(), [](Run a, Run b) { return a.first < b.first; });
  return runs;
}

}  // namespace kvferry
