// The sums of gemm_amx.h computed with vectors, for few rows of A and a B whose rows are contiguous (see gemm_amx.h; no
// include guard on purpose).
//
// AMX tiles would require packing such a B, which takes longer than reading it. Fused multiply-adds read B in place,
// and for so few rows they keep up with memory. They add in the order of amx_tiles.h and treat subnormals as zero, so
// their results are the same bit for bit, except for the bits of NaNs.

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4
inline constexpr int kAmxVectorRows = 4;          // largest number of rows whose sums fit the registers
inline constexpr int64_t kAmxMostVectorRows = 8;  // largest number of rows for which this was faster than tiles
inline constexpr int64_t kAmxStrip = 32;          // number of columns in a cache line of B

// Makes this thread treat subnormal operands and results as zero, as tiles do, while the object exists.
class FlushesSubnormals {
 public:
  FlushesSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  FlushesSubnormals(const FlushesSubnormals&) = delete;
  FlushesSubnormals& operator=(const FlushesSubnormals&) = delete;
  ~FlushesSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// Adds the products of up to 32 steps of k (`steps`) to kRows rows of `columns` sums. A row of sums consists of strips;
// in each, the even columns precede the odd ones. `a` contains kAmxVectorRows values for each of 32 steps, zeros for
// missing steps. For each line of B that is read, the line `ahead` bytes later is prefetched.
template <int kRows>
__attribute__((noinline)) void add_tile_rows(const float* a, const BFloat16* b, int64_t b_row_stride, int64_t steps,
                                             int64_t columns, int64_t ahead, float* const (&sums)[kAmxVectorRows]) {
  for (int64_t j = 0; j < columns; j += kAmxStrip) {
    const auto count = static_cast<int>(std::min(kAmxStrip, columns - j));
    const auto mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    vfloat chain[2][kRows][2] = {};  // separate sums over even and odd steps of k
    const BFloat16* line = b + j;
    // A tile also multiplies the zeros of missing steps, which turns a sum of -0 into +0. One or two such steps in each
    // chain have the same effect.
    const int64_t until = std::min(kTileDepth, steps + 2);
    for (int64_t p = 0; p < until; p += 2) {
#pragma GCC unroll 2
      for (int64_t q = 0; q < 2; ++q) {
        vuint32 both{};  // zeros for a missing step
        if (p + q < steps) {
          both = (vuint32)(count == kAmxStrip ? _mm512_loadu_si512(line) : _mm512_maskz_loadu_epi16(mask, line));
          __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(line) + ahead), 0, 2);
        }
        line += b_row_stride;
        const vfloat even = (vfloat)(both << 16), odd = (vfloat)(both & 0xffff0000u);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const vfloat left = broadcast(a[(p + q) * kAmxVectorRows + i]);
          chain[q][i][0] = multiply_add(left, even, chain[q][i][0]);
          chain[q][i][1] = multiply_add(left, odd, chain[q][i][1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* sum = sums[i] + j + half * 16;
        store(sum, load(sum) + (chain[0][i][half] + chain[1][i][half]));
      }
    }
  }
}

inline void gemm_amx_few(const Gemm<BFloat16>& g) {
  constexpr int64_t kGroups = kAmxMostVectorRows / kAmxVectorRows;
  const int64_t padded_n = round_up(g.n, kAmxStrip), padded_k = round_up(g.k, kTileDepth);
  const int64_t a_size = padded_k * kAmxVectorRows, groups = (g.m + kAmxVectorRows - 1) / kAmxVectorRows;
  auto* memory = static_cast<float*>(
      gemm_buffer().reserve((groups * a_size + (g.m + 1) * padded_n) * static_cast<int64_t>(sizeof(float))));
  float* a = carve(memory, groups * a_size);  // widened values: for each step, the rows of a group
  float* bias = carve(memory, padded_n);
  float* sums[kGroups][kAmxVectorRows] = {};
  std::fill(a, a + groups * a_size, 0.0f);
  for (int64_t i = 0; i < g.m; ++i) {
    const BFloat16* from = g.a + place_of(g.rows, i) * g.a_row_stride;
    float* to = a + i / kAmxVectorRows * a_size + i % kAmxVectorRows;
    for (int64_t p = 0; p < g.k; ++p) to[p * kAmxVectorRows] = to_accumulate(from[p * g.a_column_stride]);
    float* row = carve(memory, padded_n);
    std::fill(row, row + padded_n, 0.0f);
    sums[i / kAmxVectorRows][i % kAmxVectorRows] = row;
  }
  widen_bias(g, padded_n, bias);
  {
    const FlushesSubnormals flushes;
    const int64_t ahead = kTileDepth * g.b_row_stride * static_cast<int64_t>(sizeof(BFloat16));
    for (int64_t p = 0; p < g.k; p += kTileDepth) {
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t rows = std::min<int64_t>(kAmxVectorRows, g.m - group * kAmxVectorRows);
        const auto add = rows == 1   ? &add_tile_rows<1>
                         : rows == 2 ? &add_tile_rows<2>
                         : rows == 3 ? &add_tile_rows<3>
                                     : &add_tile_rows<4>;
        add(a + group * a_size + p * kAmxVectorRows, g.b + p * g.b_row_stride, g.b_row_stride,
            std::min(kTileDepth, g.k - p), g.n, ahead, sums[group]);
      }
    }
  }
  for (int64_t i = 0; i < g.m; ++i) {
    BFloat16* to = g.c + place_of(g.rows, i) * g.c_row_stride;
    const float* row = sums[i / kAmxVectorRows][i % kAmxVectorRows];
    for (int64_t j = 0; j < g.n; j += kAmxStrip) {
      const auto even = (__m512)load(row + j), odd = (__m512)load(row + j + 16);
      alignas(64) static constexpr int32_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
      const auto low = (vfloat)_mm512_permutex2var_ps(even, _mm512_load_si512(kOrder), odd);
      const auto high = (vfloat)_mm512_permutex2var_ps(even, _mm512_load_si512(kOrder + 16), odd);
      store_tile_row<false>(to + j, round_row(load(bias + j) + low, load(bias + j + 16) + high),
                            std::min(kAmxStrip, g.n - j));
    }
  }
}
#endif

}  // namespace pymoe::cpu::PYMOE_ISA
