// Operations across the lanes of vectors: transpose and masks (included by bodies for for_each_isa.h; no include guard
// on purpose).

namespace pymoe::cpu::PYMOE_ISA {

// Transposes a square matrix in place; each row is one vector.
template <typename S>
PYMOE_INLINE void transpose(vector_t<S> (&rows)[kLanes<S>]) {
  constexpr int kL = kLanes<S>;
#if PYMOE_ISA_LEVEL == 3
  if constexpr (std::is_same_v<S, float>) {
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      rows[i] = (vfloat)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
      rows[i + 4] = (vfloat)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
    return;
  }
#endif
  // Swaps the off-diagonal blocks of size 1, then 2, 4, ...: in rows i and i + size, the lanes of row i whose index has
  // the bit `size` change places with the lanes of row i + size whose index lacks it.
  typedef decltype(rows[0] < rows[0]) Integers;
#pragma GCC unroll 4
  for (int size = 1; size < kL; size *= 2) {
    Integers lower, upper;
    for (int lane = 0; lane < kL; ++lane) {
      lower[lane] = lane & size ? kL + lane - size : lane;
      upper[lane] = lane & size ? kL + lane : lane + size;
    }
    for (int i = 0; i < kL; ++i) {
      if (i & size) continue;
      const vector_t<S> a = rows[i], b = rows[i + size];
#if defined(__clang__)
      for (int lane = 0; lane < kL; ++lane) {
        rows[i][lane] = lower[lane] < kL ? a[lower[lane]] : b[lower[lane] - kL];
        rows[i + size][lane] = upper[lane] < kL ? a[upper[lane]] : b[upper[lane] - kL];
      }
#else
      rows[i] = __builtin_shuffle(a, b, lower);
      rows[i + size] = __builtin_shuffle(a, b, upper);
#endif
    }
  }
}

// Returns a number whose bit i is set if lane i of the comparison's result is set.
template <typename Mask>
PYMOE_INLINE uint32_t bits_of(Mask mask) {
  [[maybe_unused]] constexpr bool kWide = sizeof(mask[0]) == 8;
#if PYMOE_ISA_LEVEL == 4
  if constexpr (kWide) return _mm512_movepi64_mask((__m512i)mask);
  return _mm512_movepi32_mask((__m512i)mask);
#elif PYMOE_ISA_LEVEL == 3
  if constexpr (kWide) return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)mask));
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__) && PYMOE_MULTIVERSION
  if constexpr (kWide) return static_cast<uint32_t>(_mm_movemask_pd((__m128d)mask));
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)mask));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < static_cast<int>(sizeof(mask) / sizeof(mask[0])); ++lane) {
    bits |= static_cast<uint32_t>(mask[lane] & 1) << lane;
  }
  return bits;
#endif
}

}  // namespace pymoe::cpu::PYMOE_ISA
