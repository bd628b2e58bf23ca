#include "kvferry/hash.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kvferry/errors.hpp"
#include "processor.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

constexpr std::uint64_t kSeeds[] = {0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0xd6e8feb86659fd93,
                                    0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};

// The folded 128-bit product: two instructions on every 64-bit machine, and every input bit moves half of
// the output.
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  __extension__ using u128 = unsigned __int128;
  const u128 product = static_cast<u128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

template <typename T>
inline std::uint64_t pair_at(const T* tokens) {
  return static_cast<std::uint32_t>(tokens[0]) |
         static_cast<std::uint64_t>(static_cast<std::uint32_t>(tokens[1])) << 32;
}

template <typename T>
std::uint64_t hash_of(const T* tokens, std::size_t count) {
  // four independent lanes of four tokens each, so that the multiplications overlap
  std::uint64_t lanes[4] = {kSeeds[0], kSeeds[1], kSeeds[2], kSeeds[3]};
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int lane = 0; lane < 4; ++lane) {
      const T* four = tokens + i + static_cast<std::size_t>(lane) * 4;
      lanes[lane] = mix(pair_at(four) ^ lanes[lane], pair_at(four + 2) ^ kSeeds[4 + lane]);
    }
  }
  for (; i + 2 <= count; i += 2) {
    lanes[0] = mix(pair_at(tokens + i) ^ lanes[0], kSeeds[5]);
  }
  if (i < count) {
    lanes[0] = mix(static_cast<std::uint32_t>(tokens[i]) ^ lanes[0], kSeeds[6]);
  }
  return mix(lanes[0] ^ lanes[1] ^ kSeeds[7], lanes[2] + lanes[3] + mix(count ^ kSeeds[4], kSeeds[3]));
}

std::size_t first_difference(const std::int32_t* stored, const std::int64_t* tokens, std::size_t count) {
  std::size_t i = 0;
  while (i < count && stored[i] == tokens[i]) {
    ++i;
  }
  return i;
}

constexpr std::size_t kBlock = 32;

#if KVFERRY_HAS_VECTORS
KVFERRY_VECTORS std::size_t equal_blocks_vectors(const std::int32_t* stored, const std::int64_t* tokens,
                                                 std::size_t count) {
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    __m256i difference = _mm256_setzero_si256();
    for (std::size_t j = i; j < i + kBlock; j += 4) {
      const __m256i ours = _mm256_cvtepi32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(stored + j)));
      const __m256i theirs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens + j));
      difference = _mm256_or_si256(difference, _mm256_xor_si256(ours, theirs));
    }
    if (!_mm256_testz_si256(difference, difference)) {
      break;
    }
  }
  return i;
}
#endif

std::size_t equal_blocks(const std::int32_t* stored, const std::int64_t* tokens, std::size_t count) {
#if KVFERRY_HAS_VECTORS
  if (use_vectors) {
    return equal_blocks_vectors(stored, tokens, count);
  }
#endif
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    std::int64_t difference = 0;
    for (std::size_t j = i; j < i + kBlock; ++j) {
      difference |= stored[j] ^ tokens[j];
    }
    if (difference != 0) {
      break;
    }
  }
  return i;
}

void append_part(std::string& key, const std::optional<std::string>& part) {
  const std::uint64_t length = part ? part->size() : std::numeric_limits<std::uint64_t>::max();
  for (int byte = 0; byte < 8; ++byte) {
    key.push_back(static_cast<char>(length >> (8 * byte)));
  }
  if (part) {
    key += *part;
  }
}

}  // namespace

std::uint64_t hash_run(const Tokens& tokens, std::size_t at, std::size_t count) {
  return tokens.wide ? hash_of(tokens.as64() + at, count) : hash_of(tokens.as32() + at, count);
}

std::uint64_t chain(std::uint64_t before, std::uint64_t page) { return mix(before ^ kSeeds[1], page ^ kSeeds[6]); }

std::size_t equal_run(const std::int32_t* stored, const Tokens& tokens, std::size_t at, std::size_t count) {
  if (tokens.wide) {
    const std::int64_t* theirs = tokens.as64() + at;
    const std::size_t whole = equal_blocks(stored, theirs, count);
    return whole + first_difference(stored + whole, theirs + whole, count - whole);
  }
  const std::int32_t* theirs = tokens.as32() + at;
  if (count == 0 || std::memcmp(stored, theirs, count * sizeof(std::int32_t)) == 0) {
    return count;
  }
  return static_cast<std::size_t>(std::mismatch(stored, stored + count, theirs).first - stored);
}

std::size_t narrow(std::int32_t* out, const Tokens& tokens, std::size_t at, std::size_t count) {
  if (tokens.wide) {
    const std::int64_t* in = tokens.as64() + at;
    std::int64_t outside = 0;
    for (std::size_t i = 0; i < count; ++i) {
      outside |= in[i] & ~std::int64_t{0x7fffffff};
      out[i] = static_cast<std::int32_t>(in[i]);
    }
    if (outside == 0) {
      return tokens.size;
    }
    const auto bad = [](std::int64_t t) { return t < 0 || t > 0x7fffffff; };
    return at + static_cast<std::size_t>(std::find_if(in, in + count, bad) - in);
  }
  const std::int32_t* in = tokens.as32() + at;
  std::copy(in, in + count, out);
  const auto bad = std::find_if(in, in + count, [](std::int32_t t) { return t < 0; });
  return bad == in + count ? tokens.size : at + static_cast<std::size_t>(bad - in);
}

Namespace::Namespace(std::span<const std::optional<std::string>> parts, bool with_bigrams) : bigrams(with_bigrams) {
  key.push_back(bigrams ? 'b' : 't');
  for (const auto& part : parts) {
    append_part(key, part);
  }
  std::vector<std::int32_t> bytes(key.begin(), key.end());
  seed = hash_of(bytes.data(), bytes.size());
}

std::vector<std::uint64_t> page_keys(const Namespace& space, const Tokens& tokens, std::size_t page_size) {
  if (page_size == 0) {
    throw BadInput("a page holds at least one token, not 0");
  }
  const std::size_t keys = space.keys(tokens);
  std::vector<std::uint64_t> out;
  out.reserve(keys / page_size + 1);
  std::uint64_t before = space.seed;
  for (std::size_t at = 0; at < keys; at += page_size) {
    const std::size_t count = std::min(page_size, keys - at) + space.lookahead();
    before = chain(before, hash_run(tokens, at, count));
    out.push_back(before);
  }
  return out;
}

}  // namespace kvferry
