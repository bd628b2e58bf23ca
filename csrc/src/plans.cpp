// Groups of token indices to pages and back, and the addresses of runs.
#include "kvferry/plans.hpp"

#include <algorithm>
#include <string>

#include "kvferry/errors.hpp"
#include "page_runs.hpp"

namespace kvferry {

namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

// Addresses wrap instead of overflowing; the engine checks that they lie in registered memory.
std::int64_t address(std::int64_t base, std::int64_t page, std::int64_t item_bytes) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(base) +
                                   static_cast<std::uint64_t>(page) * static_cast<std::uint64_t>(item_bytes));
}

// BadInput when a page stands twice; only lists that are not ascending come here.
void require_unique(std::span<const std::int64_t> pages) {
  std::vector<std::int64_t> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    const auto one = std::find(pages.begin(), pages.end(), *twice);
    const auto other = std::find(one + 1, pages.end(), *twice);
    throw BadInput("page " + text(*twice) + " stands in group " + text(one - pages.begin()) + " and in group " +
                   text(other - pages.begin()));
  }
}

[[noreturn]] void refuse_group(std::span<const std::int64_t> group, std::size_t number, std::int64_t page_size,
                               std::int64_t pages) {
  const std::string name = "group " + std::to_string(number);
  if (group[0] < 0) {
    throw BadInput(name + " starts at token " + text(group[0]));
  }
  if (group[0] % page_size != 0) {
    throw BadInput(name + " starts at token " + text(group[0]) + ", off the page grid of " + text(page_size));
  }
  for (std::size_t i = 1; i < group.size(); ++i) {
    if (!steps_by_one(group[i - 1], group[i])) {
      throw BadInput(name + " is not contiguous: token " + text(group[i]) + " follows " + text(group[i - 1]));
    }
  }
  throw BadInput("page " + text(group[0] / page_size) + " of " + name + " is not of " + text(pages));
}

}  // namespace

void write_pages_of_groups(std::span<const std::int64_t> tokens, std::int64_t page_size, std::int64_t pages,
                           std::int64_t* out) {
  if (page_size < 1) {
    throw BadInput("a page has at least one token, not " + text(page_size));
  }
  const auto size = static_cast<std::size_t>(page_size);
  if (tokens.size() % size != 0) {
    throw BadInput(std::to_string(tokens.size()) + " token indices are no whole pages of " + text(page_size));
  }
  const std::size_t groups = tokens.size() / size;
  bool ascending = true;
  for (std::size_t group = 0; group < groups; ++group) {
    const std::int64_t* first = tokens.data() + group * size;
    const auto start = static_cast<std::uint64_t>(*first);
    std::uint64_t differs = 0;
    for (std::size_t i = 1; i < size; ++i) {
      differs |= static_cast<std::uint64_t>(first[i]) ^ (start + i);
    }
    const std::int64_t page = *first / page_size;
    if (*first < 0 || *first % page_size != 0 || differs != 0 || page >= pages) {
      refuse_group(tokens.subspan(group * size, size), group, page_size, pages);
    }
    ascending = ascending && (group == 0 || out[group - 1] < page);
    out[group] = page;
  }
  if (!ascending) {
    require_unique({out, groups});
  }
}

void require_tokens_fill(std::size_t pages, std::int64_t page_size, std::int64_t tokens) {
  if (page_size < 1) {
    throw BadInput("a page has at least one token, not " + text(page_size));
  }
  const std::int64_t needed = tokens < 0 ? -1 : tokens / page_size + (tokens % page_size != 0);
  if (needed != static_cast<std::int64_t>(pages)) {
    throw BadInput(text(tokens) + " tokens do not fill " + std::to_string(pages) + " pages of " + text(page_size));
  }
}

void write_slots(std::span<const std::int64_t> pages, std::int64_t page_size, std::int64_t tokens, std::int64_t* out) {
  for (std::int64_t page : pages) {
    const std::int64_t size = std::min(page_size, tokens);
    for (std::int64_t i = 0; i < size; ++i) {
      out[i] = page * page_size + i;
    }
    out += size;
    tokens -= size;
  }
}

std::optional<Stray> write_addresses(std::span<const Term> terms, std::span<const std::int64_t> source,
                                     std::span<const std::int64_t> destination, std::span<const std::int64_t> count,
                                     std::int64_t* from, std::int64_t* to, std::int64_t* length) {
  if (source.size() != destination.size() || source.size() != count.size()) {
    throw PageMismatch("runs have " + std::to_string(source.size()) + " sources, " +
                       std::to_string(destination.size()) + " destinations and " + std::to_string(count.size()) +
                       " counts");
  }
  for (std::size_t run = 0; run < source.size(); ++run) {
    if (source[run] < 0 || destination[run] < 0 || count[run] < 1) {
      throw PageMismatch("no run: " + text(count[run]) + " pages from page " + text(source[run]) + " to page " +
                         text(destination[run]));
    }
  }
  for (std::size_t term = 0; term < terms.size(); ++term) {
    const Term& t = terms[term];
    for (std::size_t run = 0; run < source.size(); ++run) {
      // not first + count > pages, which could overflow
      if (count[run] > t.source_pages || source[run] > t.source_pages - count[run]) {
        return Stray{term, source[run] + (count[run] - 1), t.source_pages};
      }
      if (count[run] > t.destination_pages || destination[run] > t.destination_pages - count[run]) {
        return Stray{term, destination[run] + (count[run] - 1), t.destination_pages};
      }
    }
  }
  for (const Term& t : terms) {
    for (std::size_t run = 0; run < source.size(); ++run) {
      *from++ = address(t.source_base, source[run], t.item_bytes);
      *to++ = address(t.destination_base, destination[run], t.item_bytes);
      *length++ = address(0, count[run], t.item_bytes);
    }
  }
  return std::nullopt;
}

}  // namespace kvferry
