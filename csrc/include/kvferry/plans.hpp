// Page plans: which pages pair with which, who sends them and where their bytes lie. No state, arrays in and out.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvferry {

// One bit for each entry of a list, bit i of word w for entry 64 * w + i, and how many are set: found first, so that
// a caller can make room for exactly what is written then.
struct Marks {
  std::vector<std::uint64_t> words;
  std::size_t count = 0;
};

// Marks the entries that begin a run of (source, destination) pairs; a run goes on while both step by one.
// PageMismatch on unequal lengths.
Marks find_breaks(std::span<const std::int64_t> source, std::span<const std::int64_t> destination);

// Writes breaks.count first pages of either side and counts.
void write_runs(const Marks& breaks, std::span<const std::int64_t> source, std::span<const std::int64_t> destination,
                std::int64_t* first_source, std::int64_t* first_destination, std::int64_t* count);

// Marks the entries of an owner; writes their pages with their absolute positions (first_position is that of entry 0).
Marks find_owned(std::span<const std::int8_t> owners, std::int8_t owner);
void write_owned(const Marks& marks, std::span<const std::int64_t> pages, std::int64_t first_position,
                 std::int64_t* owned, std::int64_t* positions);

// The page of each group of page_size token indices. BadInput, naming the value, on a partial, misaligned or
// non-contiguous group, on a page outside 0..pages and on a page that stands in two groups.
void write_pages_of_groups(std::span<const std::int64_t> tokens, std::int64_t page_size, std::int64_t pages,
                           std::int64_t* out);

// The first `tokens` token indices of pages that are read in order. BadInput unless the last page is needed and the
// pages suffice.
void require_tokens_fill(std::size_t pages, std::int64_t page_size, std::int64_t tokens);
void write_slots(std::span<const std::int64_t> pages, std::int64_t page_size, std::int64_t tokens, std::int64_t* out);

// One layer of one buffer at both ends.
struct Term {
  std::int64_t source_base;       // address of its page 0
  std::int64_t destination_base;
  std::int64_t item_bytes;        // of one page
  std::int64_t source_pages;      // in the pool
  std::int64_t destination_pages;
};

// A page that is not of the pool of a term.
struct Stray {
  std::size_t term;
  std::int64_t page;
  std::int64_t pages;
};

// terms.size() * runs addresses and lengths, all runs of a term after another. Nothing is written when a run
// leaves a pool: the stray page is returned. PageMismatch on arrays of unequal length or a run without pages.
std::optional<Stray> write_addresses(std::span<const Term> terms, std::span<const std::int64_t> source,
                                     std::span<const std::int64_t> destination, std::span<const std::int64_t> count,
                                     std::int64_t* from, std::int64_t* to, std::int64_t* length);

}  // namespace kvferry
