// The gemm of operands that are both contiguous along k, in the words of BLAS its NT case (see gemm.h; no include guard
// on purpose).
//
// An element of C is one dot product along k, kept in the lanes of one vector and summed over them at its end: nothing
// is packed, and each line of B that is read takes part whole. That makes it the fastest scheme for one row (B is
// read once, at the speed of the memory) and, with tiles of kNtRows rows by four columns in registers, one for many.
// The order of a sum depends on k alone, whatever the tile.
//
// Blocks of columns whose rows of B fit the second-level cache are multiplied by all rows of A, a few at a time. The
// lines of the next block are asked for meanwhile, evenly: memory and arithmetic then work at the same time.

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4
inline constexpr int kNtRows = 6;
#elif PYMOE_ISA_LEVEL == 3
inline constexpr int kNtRows = 3;
#else
inline constexpr int kNtRows = 2;
#endif
inline constexpr int kNtColumns = 4;
inline constexpr int64_t kNtBlockBytes = 256 << 10;
inline constexpr int64_t kNtLineBytes = 4096;  // of a row of A that are used at a time

// How elements of T are multiplied: those of A are widened before, once for all columns, those of B as they are read.
template <typename T>
struct NtProduct {
  using Row = accumulate_t<T>;  // what a row of A consists of
  using Vector = vector_t<T>;
  static constexpr int kElements = kStep<T>;

  static PYMOE_INLINE Vector load_a(const Row* source) { return load(source); }
  static PYMOE_INLINE Vector load_b(const T* source) { return load(source); }
  static PYMOE_INLINE Vector load_a(const Row* source, int count) { return load_partial(source, count); }
  static PYMOE_INLINE Vector load_b(const T* source, int count) { return load_partial(source, count); }
  static PYMOE_INLINE Vector add(Vector a, Vector b, Vector sum) { return multiply_add(a, b, sum); }
};

#if PYMOE_ISA_HAS_BF16
// As in Panel: 32 elements of a load are 16 pairs.
template <>
struct NtProduct<BFloat16> {
  using Row = BFloat16;
  using Vector = vfloat;
  static constexpr int kElements = 32;

  static PYMOE_INLINE Vector load_a(const Row* source) { return (vfloat)_mm512_loadu_si512(source); }
  static PYMOE_INLINE Vector load_b(const Row* source) { return (vfloat)_mm512_loadu_si512(source); }
  static PYMOE_INLINE Vector load_a(const Row* source, int count) {
    return (vfloat)_mm512_maskz_loadu_epi16((1u << count) - 1, source);
  }
  static PYMOE_INLINE Vector load_b(const Row* source, int count) { return load_a(source, count); }
  static PYMOE_INLINE Vector add(Vector a, Vector b, Vector sum) { return Panel<BFloat16>::add(a, b, sum); }
};
#endif

// sums[i] += the sum over the lanes of v[i].
PYMOE_INLINE void add_lanes_of_four(vfloat (&v)[4], float* sums) {
  transpose_parts(v);
  const vfloat parts = (v[0] + v[1]) + (v[2] + v[3]);
#if PYMOE_ISA_LEVEL == 4
  const auto low = __builtin_shufflevector(parts, parts, 0, 1, 2, 3, 4, 5, 6, 7);
  const auto high = __builtin_shufflevector(parts, parts, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256 half = (__m256)(low + high);
  const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif PYMOE_ISA_LEVEL == 3
  const __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)parts), _mm256_extractf128_ps((__m256)parts, 1));
#else
  const vfloat sum = parts;
#endif
  baseline::store(sums, baseline::load(sums) + (baseline::vfloat)sum);
}

PYMOE_INLINE void add_lanes_of_four(vdouble (&v)[4], double* sums) {
  for (int i = 0; i < 4; ++i) sums[i] += sum_lanes(v[i]);
}

// sums[i * 4 + j] += <row i of a, b[j]>. Asks for the lines of ahead[0], ahead[1], ..., as many as kAhead, on the way.
template <typename T, int kRows, int kAhead>
void nt_tile(int64_t k, const typename NtProduct<T>::Row* a, int64_t a_stride, const T* const (&b)[kNtColumns],
             const char* const (&ahead)[kNtColumns], accumulate_t<T>* sums) {
  using Product = NtProduct<T>;
  constexpr int kStepBytes = Product::kElements * static_cast<int>(sizeof(T));
  vector_t<T> sum[kRows][kNtColumns] = {};
  const T *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
  int64_t p = 0;
  for (; p + Product::kElements <= k; p += Product::kElements) {
    const vector_t<T> right[kNtColumns] = {Product::load_b(b0 + p), Product::load_b(b1 + p), Product::load_b(b2 + p),
                                           Product::load_b(b3 + p)};
    if (kStepBytes == 64 || p * static_cast<int64_t>(sizeof(T)) % 64 == 0) {
#pragma GCC unroll 4
      for (int j = 0; j < kAhead; ++j) __builtin_prefetch(ahead[j] + p * static_cast<int64_t>(sizeof(T)), 0, 2);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const vector_t<T> left = Product::load_a(a + i * a_stride + p);
#pragma GCC unroll 4
      for (int j = 0; j < kNtColumns; ++j) sum[i][j] = Product::add(left, right[j], sum[i][j]);
    }
  }
  if (p < k) {
    const int count = static_cast<int>(k - p);
    vector_t<T> right[kNtColumns];
    for (int j = 0; j < kNtColumns; ++j) right[j] = Product::load_b(b[j] + p, count);
    for (int i = 0; i < kRows; ++i) {
      const vector_t<T> left = Product::load_a(a + i * a_stride + p, count);
      for (int j = 0; j < kNtColumns; ++j) sum[i][j] = Product::add(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) add_lanes_of_four(sum[i], sums + i * kNtColumns);
}

template <typename T>
using NtTile = void (*)(int64_t k, const typename NtProduct<T>::Row* a, int64_t a_stride,
                        const T* const (&b)[kNtColumns], const char* const (&ahead)[kNtColumns], accumulate_t<T>* sums);

template <typename T, int kAhead>
NtTile<T> nt_tile_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr NtTile<T> tiles[] = {&nt_tile<T, i + 1, kAhead>...};
    return tiles[rows - 1];
  }(std::make_integer_sequence<int, kNtRows>{});
}

template <typename T>
void gemm_nt(const Gemm<T>& g) {
  using S = accumulate_t<T>;
  using Row = typename NtProduct<T>::Row;
  constexpr bool kWidens = !std::is_same_v<Row, T>;
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  constexpr int64_t kBlock = kNtLineBytes / static_cast<int64_t>(sizeof(Row));  // of k
  const int64_t passes = (g.m + kNtRows - 1) / kNtRows;
  const int64_t fitting = kNtBlockBytes / (std::max<int64_t>(1, g.k) * kSize) / kNtColumns * kNtColumns;
  const int64_t block = passes == 1 ? kNtColumns : std::clamp<int64_t>(fitting, 4 * kNtColumns, 64 * kNtColumns);

  S* memory = static_cast<S*>(gemm_buffer().reserve(
      static_cast<int64_t>(sizeof(S)) * (kNtRows * block + round_up(g.n, kNtColumns) + kNtRows * kBlock + 3 * 16)));
  S* sums = carve(memory, kNtRows * block);  // of a pass, by four columns
  S* bias = carve(memory, round_up(g.n, kNtColumns));
  Row* widened = reinterpret_cast<Row*>(memory);
  for (int64_t j = 0; j < round_up(g.n, kNtColumns); ++j) {
    bias[j] = g.bias != nullptr && j < g.n ? to_accumulate(g.bias[j * g.bias_stride]) : S{};
  }

  const int64_t distance = block * g.b_column_stride * kSize;
  for (int64_t first = 0; first < g.n; first += block) {
    const int64_t end = std::min(g.n, first + block);
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t rows = (g.m - row + passes - pass - 1) / (passes - pass);  // as even as they come
      // The next block's lines for a step: all four in one pass, two in each of two, or one in each of four.
      const auto tile = passes == 1 ? nt_tile_for<T, 4>(rows) : nt_tile_for<T, 2>(rows);
      const int64_t line = passes == 1 ? 0 : passes < 4 ? std::min<int64_t>(2 * pass, 2) : std::min<int64_t>(pass, 3);
      const int64_t lines = passes == 1 ? 4 : passes < 4 ? 2 : 1;
      std::fill(sums, sums + rows * block, S{});
      for (int64_t p = 0; p < g.k; p += kBlock) {
        const int64_t k = std::min(kBlock, g.k - p);
        const T* from = g.a + row * g.a_row_stride + p;
        const Row* a;
        int64_t a_stride = g.a_row_stride;
        if constexpr (kWidens) {
          for (int64_t i = 0; i < rows; ++i) {
            for_vectors<T>(k, [&](int64_t q, int count) {
              store_count(widened + i * kBlock + q, load_count(from + i * g.a_row_stride + q, count), count);
            });
          }
          a = widened;
          a_stride = kBlock;
        } else {
          a = from;
        }
        for (int64_t j = first; j < end; j += kNtColumns) {
          const T* b[kNtColumns];
          const char* ahead[kNtColumns];
          for (int64_t c = 0; c < kNtColumns; ++c) b[c] = g.b + std::min(j + c, g.n - 1) * g.b_column_stride + p;
          for (int64_t c = 0; c < kNtColumns; ++c) {
            ahead[c] = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(b[line + c % lines]) +
                                                     static_cast<uintptr_t>(distance));
          }
          tile(k, a, a_stride, b, ahead, sums + (j - first) * rows);
        }
      }
      for (int64_t j = first; j < end; j += kNtColumns) {
        const S* sum = sums + (j - first) * rows;
        T* to = g.c + row * g.c_row_stride + j;
        const int64_t columns = std::min<int64_t>(kNtColumns, g.n - j);
        for (int64_t i = 0; i < rows; ++i, sum += kNtColumns, to += g.c_row_stride) {
          if (columns == kNtColumns) {
            for (int c = 0; c < kNtColumns; c += baseline::kStep<T>) {
              baseline::store(to + c, baseline::load(bias + j + c) + baseline::load(sum + c));
            }
          } else {
            for (int64_t c = 0; c < columns; ++c) to[c] = round_to<T>(bias[j + c] + sum[c]);
          }
        }
      }
      row += rows;
    }
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
