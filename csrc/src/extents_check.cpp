// Every promise that the extents make about themselves.
#include <algorithm>
#include <cstring>

#include "kvferry/errors.hpp"
#include "kvferry/extents.hpp"

namespace kvferry {

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
