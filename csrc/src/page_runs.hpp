// Page lists as runs.
#pragma once

#include <cstdint>
#include <span>

#include "kvferry/extents.hpp"

namespace kvferry {

// Differences in unsigned numbers: a caller's extreme values must not be undefined behaviour.
[[gnu::always_inline]] inline bool steps_by_one(std::int64_t before, std::int64_t after) {
  return static_cast<std::uint64_t>(after) - static_cast<std::uint64_t>(before) == 1;
}

// Pages as maximal ascending runs; false on a page outside 0..limit.
bool to_runs(std::span<const Page> pages, std::int64_t limit, Runs& runs);

// The pages of all runs.
std::int64_t total(std::span<const Run> runs);

}  // namespace kvferry
