// Computes rows of C from the sums of gemm_amx.h (see gemm_amx.h; no include guard on purpose).
//
// A tile of 16 x 16 fp32 sums is stored row by row. Two tiles that are neighbours along a row of C make 16 rows of 32
// columns. The bias is added to them, and they are rounded to bf16 as AVX512_BF16 rounds: subnormal sums become zero.

namespace pymoe::cpu::PYMOE_ISA {

// round_sum rounds one sum to bf16, and round_row a row of 32 sums; subnormal sums become zero.
PYMOE_INLINE BFloat16 round_sum(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  return (bits & 0x7f800000u) == 0 ? BFloat16{static_cast<uint16_t>(bits >> 16 & 0x8000u)} : round_to<BFloat16>(value);
}
#if PYMOE_ISA_LEVEL == 4
PYMOE_INLINE TileRow round_row(vfloat low, vfloat high) {
#if PYMOE_ISA_HAS_BF16
  return (vfloat)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  BFloat16 row[32];
  for (int j = 0; j < 16; ++j) {
    row[j] = round_sum(low[j]);
    row[16 + j] = round_sum(high[j]);
  }
  return load_tile_row(row);
#endif
}
#endif

// Adds the bias, 32 values, to two adjacent tiles of sums, rounds the results and writes them to `rows`: 16 rows of 32
// columns of C. kTransposed: a row of a sum tile is a column of C.
template <bool kTransposed>
PYMOE_INLINE void round_sums(const float* first, const float* second, const float* bias, TileRow (&rows)[16]) {
#if PYMOE_ISA_HAS_BF16
  if constexpr (kTransposed) {
    alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i pairs = _mm512_load_si512(kPairs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // columns 2 i and 2 i + 1
      const float* from = (i < 8 ? first : second) + i % 8 * 32;
      const vfloat even = broadcast(bias[2 * i]) + load(from), odd = broadcast(bias[2 * i + 1]) + load(from + 16);
      rows[i] = (vfloat)_mm512_permutexvar_epi16(pairs, (__m512i)round_row(even, odd));
    }
    transpose(rows);
  } else {
    const vfloat left = load(bias), right = load(bias + 16);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = round_row(left + load(first + i * 16), right + load(second + i * 16));
  }
#else
  for (int i = 0; i < 16; ++i) {
    BFloat16 row[32];
    for (int j = 0; j < 32; ++j) {
      const float* sums = j < 16 ? first : second;
      row[j] = round_sum(bias[j] + (kTransposed ? sums[j % 16 * 16 + i] : sums[i * 16 + j % 16]));
    }
    memcpy(&rows[i], row, sizeof(row));
  }
#endif
}

// Stores the first `count` <= 32 elements of a row. With kStreams, a whole, aligned cache line bypasses the caches (at
// level 4); call stream_fence afterwards.
template <bool kStreams>
PYMOE_INLINE void store_tile_row(BFloat16* target, TileRow row, int64_t count) {
#if PYMOE_ISA_LEVEL == 4
  if constexpr (kStreams) {
    if (count == kTileDepth && reinterpret_cast<uintptr_t>(target) % 64 == 0) {
      return _mm512_stream_si512(reinterpret_cast<__m512i*>(target), (__m512i)row);
    }
  }
  if (count == kTileDepth) return _mm512_storeu_si512(target, (__m512i)row);
  _mm512_mask_storeu_epi16(target, (1u << count) - 1, (__m512i)row);
#else
  memcpy(target, &row, static_cast<size_t>(count) * sizeof(BFloat16));
#endif
}

}  // namespace pymoe::cpu::PYMOE_ISA
