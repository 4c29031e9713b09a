#include "kernels/dispatch.h"

#include <algorithm>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/cpu/checked_index.h"
#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

// Rows of an output that is larger than the caches are stored with non-temporal stores: a cached store would first read
// the line that it overwrites, which doubles the traffic of the stores.
#if defined(__SSE2__)
// Outputs of at least this size are streamed, since they would evict everything else from a last-level cache.
constexpr int64_t kStreamingBytes = int64_t{8} << 20;

bool can_stream(const void* base, int64_t row_bytes, int64_t total_bytes) {
  return total_bytes >= kStreamingBytes && row_bytes >= 256 && row_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(base) % 16 == 0;
}

// Copies a row with non-temporal stores. `target` must be 16-byte aligned and `bytes` a multiple of 16 (can_stream).
PYMOE_INLINE void stream_row(void* target, const void* source, int64_t bytes) {
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
}

// Makes streamed stores visible to other threads before any later store of this thread.
void finish_streaming() { _mm_sfence(); }
#else
bool can_stream(const void*, int64_t, int64_t) { return false; }
void stream_row(void*, const void*, int64_t) {}
void finish_streaming() {}
#endif

}  // namespace

void dispatch(const DispatchArguments& a) {
  const auto* x = static_cast<const char*>(a.x);
  auto* out = static_cast<char*>(a.out);
  if (a.row_bytes == 0) return;
  const bool streaming = can_stream(out, a.row_bytes, a.rows * a.row_bytes);
  const int64_t grain = std::max<int64_t>(1, (int64_t{64} << 10) / (a.row_bytes * (1 + a.choices)));

  parallel_for(0, a.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const char* row = x + token * a.row_bytes;
      for (int64_t choice = 0; choice < a.choices; ++choice) {
        const int64_t slot = checked_slot("dispatch", a.slot, token * a.choices + choice, a.choices, a.rows);
        if (slot < 0) continue;
        char* target = out + slot * a.row_bytes;
        if (streaming) {
          stream_row(target, row, a.row_bytes);
        } else {
          memcpy(target, row, static_cast<size_t>(a.row_bytes));
        }
      }
    }
    if (streaming) finish_streaming();
  });

  const int64_t used = std::clamp<int64_t>(*a.used, 0, a.rows);
  parallel_for(used, a.rows, std::max<int64_t>(1, (int64_t{256} << 10) / a.row_bytes), [&](int64_t begin, int64_t end) {
    memset(out + begin * a.row_bytes, 0, static_cast<size_t>((end - begin) * a.row_bytes));
  });
}

}  // namespace pymoe::cpu
