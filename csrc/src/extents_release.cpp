// Pages that come back: all of a call or none of it.
#include <algorithm>
#include <cstring>

#include "kvferry/errors.hpp"
#include "kvferry/extents.hpp"
#include "page_runs.hpp"

namespace kvferry {

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

}  // namespace kvferry
