// Free pages as extents: which stretches of 0..lanes*pages are free, found by size and joined when freed.
//
//   lane 0                        lane 1
//   |####....##........|          |..######.........#|        # taken or reserved, . free
//        [4..8) [10..18)           [0..2) [8..17)             an extent never crosses a lane's border
//
// Two structures hold the same extents:
//   edge lengths   the length of an extent stands at its first and at its last page, so that a freed run finds
//                  its free neighbours in O(1); what stands at other pages is stale and never read
//   SizeIndex      the extents of a lane in the order (length, first page), for best fit and largest first
// Nothing here walks over pages that an operation does not name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvferry/size_index.hpp"

namespace kvferry {

using Page = std::int64_t;

struct Run {
  std::uint32_t first;
  std::uint32_t count;
};

using Runs = std::vector<Run>;

// Compact text of a page list, as in app.core.pages.summary: "[2..5, 9] (5)".
std::string summary(std::span<const Page> pages);

class PageExtents {
 public:
  enum State : std::uint8_t { kFree = 0, kTaken = 1, kReserved = 2 };
  // Where the last part of a scattered allocation comes from: the smallest extent that holds it, which leaves
  // longer extents to later calls, or the largest, as the parts before it.
  enum class Tail { kBestFit, kLargest };

  // BadInput unless there is at least one lane of at least one page. `label` names the structure in errors.
  PageExtents(std::int64_t pages_per_lane, std::int64_t lanes, std::string label, Tail tail = Tail::kBestFit);
  PageExtents(const PageExtents&) = delete;
  PageExtents& operator=(const PageExtents&) = delete;

  std::int64_t pages_per_lane() const { return pages_; }
  std::int64_t lanes() const { return static_cast<std::int64_t>(sizes_.size()); }
  std::int64_t pages() const { return static_cast<std::int64_t>(state_.size()); }
  std::int64_t free_pages() const;
  std::int64_t free_pages(std::size_t lane) const { return free_[lane]; }
  std::int64_t largest_extent(std::size_t lane = 0) const;
  std::int64_t extents() const;
  std::int64_t reserved_pages() const { return reserved_; }

  // `count` pages of a lane: the smallest extent that holds them, else largest extents first, which needs the
  // fewest runs. False, and no change, when too few are free. `runs` is overwritten.
  bool allocate(std::size_t lane, std::int64_t count, Runs& runs);

  // One page for each entry, of that lane, in the order given, ascending within each lane. All or nothing:
  // false, and no change, when a lane has too few. BadInput on a lane that does not exist.
  bool allocate_owned(std::span<const std::int8_t> owners, Page* pages);

  // How many pages each lane lacks for these owners.
  std::vector<std::int64_t> deficits(std::span<const std::int8_t> owners) const;

  // Gives taken pages back. BadInput, and no change, when a page is foreign, repeated, free or reserved.
  void release(std::span<const Page> pages);
  void release_runs(std::span<const Page> first, std::span<const Page> count);

  // Marks pages that an allocate call has just returned as reserved for a holder; a holder may have several.
  void reserve(std::int64_t holder, std::span<const Run> runs);
  void reserve(std::int64_t holder, std::span<const Page> pages);
  // Ends a reservation: its pages are taken for good, or free again. The number of pages; BadInput on a
  // holder that has none.
  std::int64_t commit(std::int64_t holder);
  std::int64_t roll_back(std::int64_t holder);
  std::span<const Run> reserved(std::int64_t holder) const;
  std::size_t holders() const { return reservations_.size(); }

  // Free pages, or extents, in ascending order; these walk over everything and are for readers, not for
  // allocation.
  std::vector<Page> free_slots() const;
  Runs free_extents() const;

  std::span<std::uint8_t> states() { return state_; }

  // IntegrityError, with the numbers, when edge lengths, index, counts, reservations and states disagree.
  void check_integrity() const;

 private:
  std::size_t lane_of(std::uint32_t page) const { return lanes() == 1 ? 0 : page / static_cast<std::size_t>(pages_); }
  std::vector<std::int64_t> demand(std::span<const std::int8_t> owners) const;
  void take(std::size_t lane, std::uint64_t key, std::uint32_t count);
  void add_extent(std::size_t lane, std::uint32_t first, std::uint32_t count);
  void give_back(Run run);
  void give_back_all(Runs& runs);
  void mark(std::span<const Run> runs, State state);
  bool all_taken(const Runs& runs);
  [[noreturn]] void refuse_release(std::span<const Page> pages) const;
  Runs take_reservation(std::int64_t holder);

  std::int64_t pages_;
  std::string label_;
  Tail tail_;
  std::vector<std::uint8_t> state_;
  std::vector<std::uint32_t> length_at_first_;
  std::vector<std::uint32_t> length_at_last_;
  std::vector<SizeIndex> sizes_;
  std::vector<std::int64_t> free_;
  std::unordered_map<std::int64_t, Runs> reservations_;
  std::int64_t reserved_ = 0;
  Runs scratch_;
};

}  // namespace kvferry
