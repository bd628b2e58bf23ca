#include "kvferry/extents.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "kvferry/errors.hpp"

namespace kvferry {

namespace {

// Pages as maximal ascending runs; false on a page outside 0..limit.
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

}  // namespace

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
    // The smallest extent that holds what is left, else the largest; among equals the lowest.
    std::uint32_t largest = SizeIndex::length(sizes.greatest());
    bool fits = left <= largest && (runs.empty() || tail_ == Tail::kBestFit);
    auto best = sizes.at_least(SizeIndex::key(fits ? left : largest, 0));
    std::uint32_t part = std::min(left, SizeIndex::length(*best));
    runs.push_back({SizeIndex::first(*best), part});
    take(lane, *best, part);
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

void PageExtents::give_back(Run run) {
  std::size_t lane = lane_of(run.first);
  auto begin = static_cast<std::uint32_t>(lane * static_cast<std::size_t>(pages_));
  std::uint32_t end = begin + static_cast<std::uint32_t>(pages_);
  SizeIndex& sizes = sizes_[lane];
  // a release may name pages on both sides of a border in one run
  std::uint32_t stop = std::min(run.first + run.count, end);
  std::uint32_t first = run.first;
  std::memset(state_.data() + first, kFree, stop - first);
  free_[lane] += stop - first;
  std::uint32_t from = first;
  std::uint32_t to = stop;
  if (to < end && state_[to] == kFree) {
    std::uint32_t length = length_at_first_[to];
    sizes.erase(SizeIndex::key(length, to));
    to += length;
  }
  if (from > begin && state_[from - 1] == kFree) {
    std::uint32_t length = length_at_last_[from - 1];
    from -= length;
    sizes.erase(SizeIndex::key(length, from));
  }
  add_extent(lane, from, to - from);
  if (stop < run.first + run.count) {
    give_back({stop, run.first + run.count - stop});
  }
}

void PageExtents::give_back_all(Runs& runs) {
  // Neighbours that come one by one would be joined one by one: with many runs it pays to join them first.
  if (runs.size() > 16) {
    std::sort(runs.begin(), runs.end(), [](Run a, Run b) { return a.first < b.first; });
    std::size_t kept = 0;
    for (std::size_t i = 1; i < runs.size(); ++i) {
      if (runs[i].first == runs[kept].first + runs[kept].count) {
        runs[kept].count += runs[i].count;
      } else {
        runs[++kept] = runs[i];
      }
    }
    runs.resize(kept + 1);
  }
  for (const Run& run : runs) {
    give_back(run);
  }
}

void PageExtents::mark(std::span<const Run> runs, State state) {
  for (const Run& run : runs) {
    std::memset(state_.data() + run.first, state, run.count);
  }
}

// Whether each page of the runs is taken and stands there once. Runs are marked free on the way, so that a page that
// stands twice is seen, and taken again at the end: give_back needs the states of pages whose extent does not exist yet
// to be other than free.
bool PageExtents::all_taken(const Runs& runs) {
  std::size_t good = 0;
  for (; good < runs.size(); ++good) {
    const Run& run = runs[good];
    std::uint8_t differs = 0;
    for (std::uint32_t i = 0; i < run.count; ++i) {
      differs |= state_[run.first + i] ^ kTaken;
    }
    if (differs != 0) {
      break;
    }
    std::memset(state_.data() + run.first, kFree, run.count);
  }
  mark({runs.data(), good}, kTaken);
  return good == runs.size();
}

void PageExtents::release(std::span<const Page> pages) {
  if (!to_runs(pages, this->pages(), scratch_) || !all_taken(scratch_)) {
    refuse_release(pages);
  }
  give_back_all(scratch_);
}

void PageExtents::release_runs(std::span<const Page> first, std::span<const Page> count) {
  if (first.size() != count.size()) {
    throw PageMismatch("runs have " + std::to_string(first.size()) + " starts and " + std::to_string(count.size()) +
                       " counts");
  }
  scratch_.clear();
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (count[i] < 1 || count[i] > pages() || first[i] < 0 || first[i] > pages() - count[i]) {
      throw BadInput("a run of " + std::to_string(count[i]) + " pages from page " + std::to_string(first[i]) +
                     " is not of this " + label_ + " of " + std::to_string(pages()));
    }
    scratch_.push_back({static_cast<std::uint32_t>(first[i]), static_cast<std::uint32_t>(count[i])});
  }
  if (!all_taken(scratch_)) {
    std::vector<Page> all;
    for (const Run& run : scratch_) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        all.push_back(run.first + i);
      }
    }
    refuse_release(all);
  }
  give_back_all(scratch_);
}

void PageExtents::refuse_release(std::span<const Page> pages) const {
  auto [least, most] = std::minmax_element(pages.begin(), pages.end());
  if (*least < 0) {
    throw BadInput("negative page number: " + std::to_string(*least));
  }
  std::vector<Page> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw BadInput("a page stands twice in " + summary(pages) + ": " + std::to_string(*twice));
  }
  if (*most >= this->pages()) {
    throw BadInput("page " + std::to_string(*most) + " is not of this " + label_ + " of " +
                   std::to_string(this->pages()));
  }
  std::vector<Page> held;
  std::vector<Page> free;
  for (Page page : pages) {
    std::uint8_t state = state_[static_cast<std::size_t>(page)];
    if (state == kReserved) {
      held.push_back(page);
    } else if (state == kFree) {
      free.push_back(page);
    }
  }
  if (!free.empty()) {
    throw BadInput("freed twice: " + summary(free));
  }
  throw BadInput("freed while reserved: " + summary(held));
}

void PageExtents::reserve(std::int64_t holder, std::span<const Run> runs) {
  Runs& kept = reservations_[holder];
  kept.insert(kept.end(), runs.begin(), runs.end());
  mark(runs, kReserved);
  reserved_ += total(runs);
}

void PageExtents::reserve(std::int64_t holder, std::span<const Page> pages) {
  to_runs(pages, this->pages(), scratch_);
  reserve(holder, std::span<const Run>(scratch_));
}

std::span<const Run> PageExtents::reserved(std::int64_t holder) const {
  auto found = reservations_.find(holder);
  if (found == reservations_.end()) {
    return {};
  }
  return found->second;
}

Runs PageExtents::take_reservation(std::int64_t holder) {
  auto found = reservations_.find(holder);
  if (found == reservations_.end()) {
    throw BadInput("nothing is reserved for holder " + std::to_string(holder));
  }
  Runs runs = std::move(found->second);
  reservations_.erase(found);
  reserved_ -= total(runs);
  return runs;
}

std::int64_t PageExtents::commit(std::int64_t holder) {
  Runs runs = take_reservation(holder);
  mark(runs, kTaken);
  return total(runs);
}

std::int64_t PageExtents::roll_back(std::int64_t holder) {
  Runs runs = take_reservation(holder);
  std::int64_t pages = total(runs);
  give_back_all(runs);
  return pages;
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

void PageExtents::check_integrity() const {
  Runs found = free_extents();
  std::int64_t sum = 0;
  std::string wrong;
  std::vector<std::uint8_t> seen(state_.size(), kTaken);
  const Run* before = nullptr;
  for (const Run& run : found) {
    sum += run.count;
    std::uint64_t stop = std::uint64_t{run.first} + run.count;
    if (run.count == 0 || stop > state_.size() || lane_of(run.first) != lane_of(static_cast<std::uint32_t>(stop - 1))) {
      wrong = "an extent leaves its lane";
      break;
    }
    if (length_at_first_[run.first] != run.count || length_at_last_[stop - 1] != run.count) {
      wrong = "edge lengths of page " + std::to_string(run.first) + " differ";
    }
    if (before != nullptr && before->first + before->count >= run.first &&
        lane_of(before->first) == lane_of(run.first)) {
      wrong = "extents touch at page " + std::to_string(run.first);
    }
    std::memset(seen.data() + run.first, kFree, run.count);
    before = &run;
  }
  std::int64_t held = 0;
  for (const auto& [holder, runs] : reservations_) {
    for (const Run& run : runs) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        if (seen[run.first + i] != kTaken) {
          wrong = "page " + std::to_string(run.first + i) + " of holder " + std::to_string(holder) + " is not its own";
        }
        seen[run.first + i] = kReserved;
      }
      held += run.count;
    }
  }
  if (held != reserved_) {
    wrong = std::to_string(reserved_) + " reserved, holders have " + std::to_string(held);
  }
  for (std::size_t lane = 0; lane < sizes_.size(); ++lane) {
    std::int64_t of_lane = 0;
    sizes_[lane].each([&](std::uint64_t key) { of_lane += SizeIndex::length(key); });
    if (of_lane != free_[lane]) {
      wrong = "lane " + std::to_string(lane) + " counts " + std::to_string(free_[lane]) + " free, not " +
              std::to_string(of_lane);
    }
  }
  if (wrong.empty() && seen != state_) {
    auto at = std::mismatch(seen.begin(), seen.end(), state_.begin()).first - seen.begin();
    wrong = "the state of page " + std::to_string(at) + " is another";
  }
  if (!wrong.empty() || sum != free_pages()) {
    std::string text = label_ + ": " + std::to_string(free_pages()) + " free, extents hold " + std::to_string(sum) + ": ";
    for (std::size_t i = 0; i < found.size() && i < 8; ++i) {
      text += "(" + std::to_string(found[i].first) + ", " + std::to_string(std::uint64_t{found[i].first} + found[i].count) +
              ") ";
    }
    auto taken = static_cast<std::int64_t>(state_.size()) - std::count(state_.begin(), state_.end(), kFree);
    throw IntegrityError(text + "and " + std::to_string(taken) + " of " + std::to_string(state_.size()) + " taken; " +
                         wrong);
  }
}

}  // namespace kvferry
