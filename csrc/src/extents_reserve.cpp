// Pages held by number until they are kept or given back, all of a holder at once.
#include "kvferry/errors.hpp"
#include "kvferry/extents.hpp"
#include "page_runs.hpp"

namespace kvferry {

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

}  // namespace kvferry
