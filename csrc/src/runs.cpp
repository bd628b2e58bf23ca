// Coalescing: where both sides of a list of page pairs step by one.
#include <algorithm>
#include <bit>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvferry/errors.hpp"
#include "kvferry/plans.hpp"
#include "page_runs.hpp"
#include "processor.hpp"

namespace kvferry {
namespace {

KVFERRY_INLINE std::uint64_t break_bit(const std::int64_t* source, const std::int64_t* destination, std::size_t i) {
  const bool goes_on = steps_by_one(source[i - 1], source[i]) & steps_by_one(destination[i - 1], destination[i]);
  return std::uint64_t{!goes_on} << i;
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
    mask |= break_bit(source, destination, i);
  }
  return mask;
}

#if KVFERRY_HAS_VECTORS
KVFERRY_VECTORS inline __m256i step_of(const std::int64_t* at) {
  return _mm256_sub_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at - 1)));
}

KVFERRY_VECTORS std::uint64_t break_mask_vectors(const std::int64_t* source, const std::int64_t* destination,
                                                 std::size_t size) {
  std::uint64_t mask = 0;
  std::size_t i = 0;
  const __m256i one = _mm256_set1_epi64x(1);
  for (; i + 4 <= size; i += 4) {
    const __m256i goes_on = _mm256_and_si256(_mm256_cmpeq_epi64(step_of(source + i), one),
                                             _mm256_cmpeq_epi64(step_of(destination + i), one));
    const auto bits = static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(goes_on)));
    mask |= static_cast<std::uint64_t>(bits ^ 0xf) << i;
  }
  for (; i < size; ++i) {
    mask |= break_bit(source, destination, i);
  }
  return mask;
}
#endif

using Span = std::span<const std::int64_t>;

template <std::uint64_t (*mask_of)(const std::int64_t*, const std::int64_t*, std::size_t)>
KVFERRY_INLINE void mark_breaks(Span source, Span destination, Marks& breaks) {
  for (std::size_t word = 0; word < breaks.words.size(); ++word) {
    const std::size_t begin = word * 64;
    const std::size_t size = std::min<std::size_t>(64, source.size() - begin);
    std::uint64_t bits = 1;
    if (word != 0) {
      bits = mask_of(source.data() + begin, destination.data() + begin, size);
    } else if (size > 1) {
      bits |= mask_of(source.data() + 1, destination.data() + 1, size - 1) << 1;
    }
    breaks.words[word] = bits;
    breaks.count += static_cast<std::size_t>(std::popcount(bits));
  }
}

#if KVFERRY_HAS_VECTORS
KVFERRY_VECTORS void mark_breaks_vectors(Span source, Span destination, Marks& breaks) {
  mark_breaks<break_mask_vectors>(source, destination, breaks);
}
#endif

}  // namespace

Marks find_breaks(Span source, Span destination) {
  if (source.size() != destination.size()) {
    throw PageMismatch("source has " + std::to_string(source.size()) + " pages, destination " +
                       std::to_string(destination.size()));
  }
  Marks breaks;
  breaks.words.resize((source.size() + 63) / 64);
#if KVFERRY_HAS_VECTORS
  if (use_vectors) {
    mark_breaks_vectors(source, destination, breaks);
    return breaks;
  }
#endif
  mark_breaks<break_mask>(source, destination, breaks);
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

}  // namespace kvferry
