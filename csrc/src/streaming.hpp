// Copies that bypass the caches on their way out. SSE2 belongs to every x86-64; elsewhere the C library
// decides by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvferry {

#if defined(__SSE2__)
// `next` is where the next copy will read. The processor's own prefetching ends at each 4 KiB of a list
// that jumps about; asking ahead, across the end of this item, keeps the memory busy.
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* next) {
  constexpr std::size_t kLine = 64, kStep = 2 * kLine, kAhead = 1024;
  // whole lines only: a partly written line costs a read of it
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + kStep) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kStep <= bytes; at += kStep) {
    const std::size_t ahead = at + kAhead;
    const auto* const wanted = reinterpret_cast<const char*>(ahead < bytes ? from + ahead : next + (ahead - bytes));
    _mm_prefetch(wanted, _MM_HINT_NTA);
    _mm_prefetch(wanted + kLine, _MM_HINT_NTA);
    const auto* const in = reinterpret_cast<const __m128i*>(from + at);
    auto* const out = reinterpret_cast<__m128i*>(to + at);
    __m128i line[kStep / sizeof(__m128i)];
    for (std::size_t i = 0; i < kStep / sizeof(__m128i); ++i) {
      line[i] = _mm_loadu_si128(in + i);
    }
    for (std::size_t i = 0; i < kStep / sizeof(__m128i); ++i) {
      _mm_stream_si128(out + i, line[i]);
    }
  }
  std::memcpy(to + at, from + at, bytes - at);
}

// Streamed bytes are seen by other threads after this.
inline void stream_fence() { _mm_sfence(); }
#else
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte*) {
  std::memcpy(to, from, bytes);
}
inline void stream_fence() {}
#endif

}  // namespace kvferry
