// Copying rows of bytes at memory speed.
//
// Rows that go to an output larger than the caches are stored past them (non-temporal): a cached store would first
// read the line that it overwrites, half again the traffic. `finish_streaming` orders such stores before whatever
// the thread publishes next.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/macros.h"

namespace pymoe::cpu {

// Outputs from this size on are streamed: they would evict everything else from a last-level cache.
inline constexpr int64_t kStreamingBytes = int64_t{8} << 20;

inline bool can_stream(const void* base, int64_t row_bytes, int64_t total_bytes) {
#if defined(__SSE2__)
  return total_bytes >= kStreamingBytes && row_bytes >= 256 && row_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(base) % 16 == 0;
#else
  (void)base, (void)row_bytes, (void)total_bytes;
  return false;
#endif
}

// target must be 16-byte aligned and bytes a multiple of 16 (can_stream).
PYMOE_INLINE void stream_row(void* target, const void* source, int64_t bytes) {
#if defined(__SSE2__)
  auto* to = static_cast<__m128i*>(target);
  const auto* from = static_cast<const __m128i*>(source);
  int64_t i = 0;
  for (; i + 4 <= bytes / 16; i += 4) {
    const __m128i a = _mm_loadu_si128(from + i), b = _mm_loadu_si128(from + i + 1);
    const __m128i c = _mm_loadu_si128(from + i + 2), d = _mm_loadu_si128(from + i + 3);
    _mm_stream_si128(to + i, a);
    _mm_stream_si128(to + i + 1, b);
    _mm_stream_si128(to + i + 2, c);
    _mm_stream_si128(to + i + 3, d);
  }
  for (; i < bytes / 16; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
#else
  memcpy(target, source, static_cast<size_t>(bytes));
#endif
}

inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace pymoe::cpu
