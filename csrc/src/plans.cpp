#include "kvferry/plans.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kvferry/errors.hpp"

namespace kvferry {

namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

// Differences in unsigned numbers: a caller's extreme values must not be undefined behaviour.
bool steps_by_one(std::int64_t before, std::int64_t after) {
  return static_cast<std::uint64_t>(after) - static_cast<std::uint64_t>(before) == 1;
}

// Bit i says that entry i does not go on from entry i - 1, for up to 64 entries; entry -1 exists.
std::uint64_t break_mask(const std::int64_t* source, const std::int64_t* destination, std::size_t size) {
  std::uint64_t mask = 0;
  std::size_t i = 0;
#if defined(__SSE2__)
  const auto load = [](const std::int64_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
  const __m128i one = _mm_set1_epi64x(1);
  for (; i + 2 <= size; i += 2) {
    // what each side's step lacks to one; a number other than zero has the sign bit set in itself or its negative
    const __m128i from = _mm_sub_epi64(_mm_sub_epi64(load(source + i), load(source + i - 1)), one);
    const __m128i to = _mm_sub_epi64(_mm_sub_epi64(load(destination + i), load(destination + i - 1)), one);
    const __m128i differs = _mm_or_si128(from, to);
    const __m128i sign = _mm_or_si128(differs, _mm_sub_epi64(_mm_setzero_si128(), differs));
    mask |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(_mm_movemask_pd(_mm_castsi128_pd(sign)))) << i;
  }
#endif
  for (; i < size; ++i) {
    const bool goes_on = steps_by_one(source[i - 1], source[i]) & steps_by_one(destination[i - 1], destination[i]);
    mask |= std::uint64_t{!goes_on} << i;
  }
  return mask;
}

// Addresses wrap instead of overflowing; the engine checks that they lie in registered memory.
std::int64_t address(std::int64_t base, std::int64_t page, std::int64_t item_bytes) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(base) +
                                   static_cast<std::uint64_t>(page) * static_cast<std::uint64_t>(item_bytes));
}

// Bit i says that owners[i] == owner, for up to 64 entries.
std::uint64_t owned_mask(const std::int8_t* owners, std::size_t size, std::int8_t owner) {
#if defined(__SSE2__)
  if (size == 64) {
    const __m128i wanted = _mm_set1_epi8(owner);
    std::uint64_t mask = 0;
    for (int part = 0; part < 4; ++part) {
      const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(owners) + part);
      const int bits = _mm_movemask_epi8(_mm_cmpeq_epi8(found, wanted));
      mask |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(bits)) << (16 * part);
    }
    return mask;
  }
#endif
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < size; ++i) {
    mask |= std::uint64_t{owners[i] == owner} << i;
  }
  return mask;
}

}  // namespace

Marks find_breaks(std::span<const std::int64_t> source, std::span<const std::int64_t> destination) {
  if (source.size() != destination.size()) {
    throw PageMismatch("source has " + std::to_string(source.size()) + " pages, destination " +
                       std::to_string(destination.size()));
  }
  Marks breaks;
  breaks.words.resize((source.size() + 63) / 64);
  for (std::size_t word = 0; word < breaks.words.size(); ++word) {
    const std::size_t begin = word * 64;
    const std::size_t size = std::min<std::size_t>(64, source.size() - begin);
    std::uint64_t bits = 1;
    if (word != 0) {
      bits = break_mask(source.data() + begin, destination.data() + begin, size);
    } else if (size > 1) {
      bits |= break_mask(source.data() + 1, destination.data() + 1, size - 1) << 1;
    }
    breaks.words[word] = bits;
    breaks.count += static_cast<std::size_t>(std::popcount(bits));
  }
  return breaks;
}

void write_runs(const Marks& breaks, std::span<const std::int64_t> source, std::span<const std::int64_t> destination,
                std::int64_t* first_source, std::int64_t* first_destination, std::int64_t* count) {
  std::size_t run = 0;
  std::size_t before = 0;
  for (std::size_t word = 0; word < breaks.words.size(); ++word) {
    for (std::uint64_t bits = breaks.words[word]; bits != 0; bits &= bits - 1) {
      const std::size_t at = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
      first_source[run] = source[at];
      first_destination[run] = destination[at];
      if (run != 0) {
        count[run - 1] = static_cast<std::int64_t>(at - before);
      }
      before = at;
      ++run;
    }
  }
  if (run != 0) {
    count[run - 1] = static_cast<std::int64_t>(source.size() - before);
  }
}

Marks find_owned(std::span<const std::int8_t> owners, std::int8_t owner) {
  Marks marks;
  marks.words.resize((owners.size() + 63) / 64);
  for (std::size_t word = 0; word < marks.words.size(); ++word) {
    const std::size_t begin = word * 64;
    marks.words[word] = owned_mask(owners.data() + begin, std::min<std::size_t>(64, owners.size() - begin), owner);
    marks.count += static_cast<std::size_t>(std::popcount(marks.words[word]));
  }
  return marks;
}

void write_owned(const Marks& marks, std::span<const std::int64_t> pages, std::int64_t first_position,
                 std::int64_t* owned, std::int64_t* positions) {
  for (std::size_t word = 0; word < marks.words.size(); ++word) {
    const std::int64_t* page = pages.data() + word * 64;
    const std::int64_t position = first_position + static_cast<std::int64_t>(word * 64);
    std::uint64_t bits = marks.words[word];
    if (bits == ~std::uint64_t{0}) {
      std::copy_n(page, 64, owned);
      std::iota(positions, positions + 64, position);
      owned += 64;
      positions += 64;
      continue;
    }
    for (; bits != 0; bits &= bits - 1) {
      const int i = std::countr_zero(bits);
      *owned++ = page[i];
      *positions++ = position + i;
    }
  }
}

namespace {

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
