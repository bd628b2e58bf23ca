// The owner filter: which entries of a list are of one owner.
#include <algorithm>
#include <bit>
#include <numeric>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvferry/plans.hpp"
#include "processor.hpp"

namespace kvferry {
namespace {

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

#if KVFERRY_HAS_VECTORS
KVFERRY_VECTORS inline std::uint64_t owned_mask_vectors(const std::int8_t* owners, std::size_t size,
                                                        std::int8_t owner) {
  if (size != 64) {
    return owned_mask(owners, size, owner);
  }
  const __m256i wanted = _mm256_set1_epi8(owner);
  const auto* const half = reinterpret_cast<const __m256i*>(owners);
  const int low = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(half), wanted));
  const int high = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(half + 1), wanted));
  return static_cast<std::uint32_t>(low) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32;
}
#endif

template <std::uint64_t (*mask_of)(const std::int8_t*, std::size_t, std::int8_t)>
KVFERRY_INLINE void mark_owned(std::span<const std::int8_t> owners, std::int8_t owner, Marks& marks) {
  for (std::size_t word = 0; word < marks.words.size(); ++word) {
    const std::size_t begin = word * 64;
    const std::uint64_t bits =
        mask_of(owners.data() + begin, std::min<std::size_t>(64, owners.size() - begin), owner);
    marks.words[word] = bits;
    marks.count += static_cast<std::size_t>(std::popcount(bits));
  }
}

// Entries of a word that are written without asking how many there are: what is too much is written over by the
// next word. Asking costs a mispredicted branch in nearly every word.
constexpr std::size_t kUnasked = 12;
constexpr std::size_t kStep = 4;

struct Out {
  std::int64_t* owned;
  std::int64_t* positions;
};

template <std::size_t count>
KVFERRY_INLINE std::uint64_t write_some(std::uint64_t bits, const std::int64_t* page, std::int64_t position, Out out) {
  for (std::size_t i = 0; i < count; ++i) {
    const int at = std::countr_zero(bits);  // 64 when none is left
    out.owned[i] = page[at];
    out.positions[i] = position + at;
    bits &= bits - 1;
  }
  return bits;
}

KVFERRY_INLINE void write_marked(const Marks& marks, const std::int64_t* pages, std::int64_t first_position, Out out) {
  std::size_t room = marks.count;
  for (std::size_t word = 0; word < marks.words.size(); ++word) {
    const std::int64_t* page = pages + word * 64;
    const std::int64_t position = first_position + static_cast<std::int64_t>(word * 64);
    std::uint64_t bits = marks.words[word];
    const auto count = static_cast<std::size_t>(std::popcount(bits));
    if (count == 64) {
      std::copy_n(page, 64, out.owned);
      std::iota(out.positions, out.positions + 64, position);
    } else if (room >= count + kUnasked) {  // then a later word has some, too: page[64] exists
      bits = write_some<kUnasked>(bits, page, position, out);
      for (std::size_t done = kUnasked; done < count; done += kStep) {
        bits = write_some<kStep>(bits, page, position, {out.owned + done, out.positions + done});
      }
    } else {
      for (std::size_t done = 0; done < count; ++done) {
        bits = write_some<1>(bits, page, position, {out.owned + done, out.positions + done});
      }
    }
    out.owned += count;
    out.positions += count;
    room -= count;
  }
}

#if KVFERRY_HAS_VECTORS
KVFERRY_VECTORS void mark_owned_vectors(std::span<const std::int8_t> owners, std::int8_t owner, Marks& marks) {
  mark_owned<owned_mask_vectors>(owners, owner, marks);
}

KVFERRY_VECTORS void write_marked_vectors(const Marks& marks, const std::int64_t* pages, std::int64_t first_position,
                                          Out out) {
  write_marked(marks, pages, first_position, out);
}
#endif

}  // namespace

Marks find_owned(std::span<const std::int8_t> owners, std::int8_t owner) {
  Marks marks;
  marks.words.resize((owners.size() + 63) / 64);
#if KVFERRY_HAS_VECTORS
  if (use_vectors) {
    mark_owned_vectors(owners, owner, marks);
    return marks;
  }
#endif
  mark_owned<owned_mask>(owners, owner, marks);
  return marks;
}

void write_owned(const Marks& marks, std::span<const std::int64_t> pages, std::int64_t first_position,
                 std::int64_t* owned, std::int64_t* positions) {
#if KVFERRY_HAS_VECTORS
  if (use_vectors) {
    write_marked_vectors(marks, pages.data(), first_position, {owned, positions});
    return;
  }
#endif
  write_marked(marks, pages.data(), first_position, {owned, positions});
}

}  // namespace kvferry
