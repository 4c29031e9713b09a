// The gemm of operands that are both contiguous along k, the NT case of BLAS (see gemm.h; no include guard on purpose).
//
// An element of C is one dot product along k, kept in one vector whose lanes are summed at the end: B is not packed,
// and each line of B that is read is used completely. So this scheme is the fastest for one row (B is read once, at the
// speed of memory) and, with tiles of kNtRows rows by four columns in registers, for a few rows. The order of a sum
// depends only on k, not on the tile; gemm_nt_packed.h adds in the same order for many rows.
//
// B is cut into blocks of columns that fit the second-level cache. Each is multiplied by all rows of A, a few rows at a
// time, while the lines of the next block are prefetched at a steady rate: memory accesses and arithmetic overlap.

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4 || PYMOE_NEON
inline constexpr int kNtRows = 6;
#elif PYMOE_ISA_LEVEL == 3
inline constexpr int kNtRows = 3;
#else
inline constexpr int kNtRows = 2;
#endif
inline constexpr int kNtColumns = 4;
inline constexpr int64_t kNtStreamAhead = 8192;  // bytes of B
// Target number of bytes of B in a block: enough work per pass to make up for reading the rows of A. With AVX-512,
// twice as much was 4 to 8 % faster for fp32 on a Zen 5, and no faster for bf16.
template <typename T>
inline constexpr int64_t kNtBlockBytes = (PYMOE_ISA_LEVEL == 4 && sizeof(T) == 4 ? 512 : 256) << 10;
inline constexpr int64_t kNtLineBytes = 4096;  // bytes of a row of A that are used at a time

// How elements of T are loaded for Panel<T>::add. Elements of A are widened to `Row` once for a block of columns,
// elements of B whenever they are loaded.
template <typename T>
struct NtProduct {
  using Row = accumulate_t<T>;  // type of the elements of a row of A
  static constexpr int kElements = kStep<T>;

  template <typename From>
  static PYMOE_INLINE vector_t<T> load_some(const From* source) {
    return load(source);
  }
  template <typename From>
  static PYMOE_INLINE vector_t<T> load_some(const From* source, int count) {
    return load_partial(source, count);
  }
};

#if PYMOE_ISA_HAS_BF16
// One load of 32 elements gives the 16 pairs that Panel<BFloat16>::add multiplies.
template <>
struct NtProduct<BFloat16> {
  using Row = BFloat16;
  static constexpr int kElements = 32;

  static PYMOE_INLINE vfloat load_some(const Row* source) { return (vfloat)_mm512_loadu_si512(source); }
  static PYMOE_INLINE vfloat load_some(const Row* source, int count) {
    return (vfloat)_mm512_maskz_loadu_epi16((1u << count) - 1, source);
  }
};
#endif

// Sets sums[i] to the sum over the lanes of v[i].
PYMOE_INLINE void sum_lanes_of_four(vfloat (&v)[4], float* sums) {
  transpose_parts(v);
  const vfloat parts = (v[0] + v[1]) + (v[2] + v[3]);
#if PYMOE_ISA_LEVEL == 4
  const auto low = __builtin_shufflevector(parts, parts, 0, 1, 2, 3, 4, 5, 6, 7);
  const auto high = __builtin_shufflevector(parts, parts, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256 half = (__m256)(low + high);
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif PYMOE_ISA_LEVEL == 3
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128((__m256)parts), _mm256_extractf128_ps((__m256)parts, 1)));
#else
  store(sums, parts);
#endif
}

PYMOE_INLINE void sum_lanes_of_four(vdouble (&v)[4], double* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = sum_lanes(v[i]);
}

// Largest number of rows for which nt_stream is used if a row of A, in elements of NtProduct<T>::Row, has at most
// kNtLineBytes bytes. For longer rows, the limit is two. Up to these limits nt_stream was faster than nt_tile on a Zen
// 5.
template <typename T>
inline constexpr int kNtStreamRows = Panel<T>::kDepth == 2 ? 8 : std::min(kNtRows, 3);

// Arguments of nt_tile and nt_stream, which multiply rows of A by kNtColumns columns of B along a block of k. nt_tile
// continues the sums in `lanes`, or starts at zero in the first block, and writes them back to `lanes`, except in the
// last block: there it writes the results sums[i * kNtColumns + j] = <row i of A, b[j]>.
template <typename T>
struct NtBlock {
  int64_t k;
  const typename NtProduct<T>::Row* a;
  int64_t a_stride;
  const T* b[kNtColumns];
  const char* ahead[kNtColumns];  // lines that nt_tile prefetches; it uses the first kAhead
  uintptr_t distance;             // distance in bytes from the lines of b to those that nt_stream prefetches
  vector_t<T>* lanes;
  bool first;
  bool last;
  accumulate_t<T>* sums;
};

// Multiplies one block of k, with all kRows x kNtColumns sums in registers.
template <typename T, int kRows, int kAhead>
void nt_tile(const NtBlock<T>& block) {
  using Product = NtProduct<T>;
  constexpr int kStepBytes = Product::kElements * static_cast<int>(sizeof(T));
  const T* const b[kNtColumns] = {block.b[0], block.b[1], block.b[2], block.b[3]};
  const auto* a = block.a;
  const int64_t k = block.k, a_stride = block.a_stride;
  vector_t<T> sum[kRows][kNtColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kNtColumns; ++j) sum[i][j] = block.first ? vector_t<T>{} : block.lanes[i * kNtColumns + j];
  }
  int64_t p = 0;
  for (; p + Product::kElements <= k; p += Product::kElements) {
    if (kStepBytes == 64 || p * static_cast<int64_t>(sizeof(T)) % 64 == 0) {
#pragma GCC unroll 4
      for (int j = 0; j < kAhead; ++j) __builtin_prefetch(block.ahead[j] + p * static_cast<int64_t>(sizeof(T)), 0, 2);
    }
    // Load all vectors of the first operand, then one vector of the second at a time. With AVX2, sums take twelve of
    // the 16 registers, so the first operand must be A, which needs only three.
#if PYMOE_ISA_LEVEL != 3
    vector_t<T> right[kNtColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kNtColumns; ++j) right[j] = Product::load_some(b[j] + p);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const vector_t<T> left = Product::load_some(a + i * a_stride + p);
#pragma GCC unroll 4
      for (int j = 0; j < kNtColumns; ++j) sum[i][j] = Panel<T>::add(left, right[j], sum[i][j]);
    }
#else
    vector_t<T> left[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) left[i] = Product::load_some(a + i * a_stride + p);
#pragma GCC unroll 4
    for (int j = 0; j < kNtColumns; ++j) {
      const vector_t<T> right = Product::load_some(b[j] + p);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i][j] = Panel<T>::add(left[i], right, sum[i][j]);
    }
#endif
  }
  if (p < k) {
    const int count = static_cast<int>(k - p);
    vector_t<T> right[kNtColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kNtColumns; ++j) right[j] = Product::load_some(block.b[j] + p, count);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const vector_t<T> left = Product::load_some(a + i * a_stride + p, count);
#pragma GCC unroll 4
      for (int j = 0; j < kNtColumns; ++j) sum[i][j] = Panel<T>::add(left, right[j], sum[i][j]);
    }
  }
  if (!block.last) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kNtColumns; ++j) block.lanes[i * kNtColumns + j] = sum[i][j];
    }
    return;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum_lanes_of_four(sum[i], block.sums + i * kNtColumns);
}

// Multiplies few rows, along all of k. Reads only one or two columns of B at a time, which gives the highest bandwidth.
template <typename T, int kRows>
void nt_stream(const NtBlock<T>& block) {
  using Product = NtProduct<T>;
  constexpr int kAtOnce = kRows <= 3 ? 1 : 2;
  const auto* a = block.a;
  const int64_t k = block.k, a_stride = block.a_stride;
  vector_t<T> sum[kRows][kNtColumns];
#pragma GCC unroll 1
  for (int first = 0; first < kNtColumns; first += kAtOnce) {
    const T* const* b = block.b + first;
    vector_t<T> some[kRows][kAtOnce] = {};
    int64_t p = 0;
#pragma GCC unroll 2
    for (; p + Product::kElements <= k; p += Product::kElements) {
      vector_t<T> right[kAtOnce];
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        right[j] = Product::load_some(b[j] + p);
        __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(b[j] + p) + block.distance), 0, 2);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const vector_t<T> left = Product::load_some(a + i * a_stride + p);
#pragma GCC unroll 2
        for (int j = 0; j < kAtOnce; ++j) some[i][j] = Panel<T>::add(left, right[j], some[i][j]);
      }
    }
    if (p < k) {
      const int count = static_cast<int>(k - p);
      for (int j = 0; j < kAtOnce; ++j) {
        const vector_t<T> right = Product::load_some(b[j] + p, count);
        for (int i = 0; i < kRows; ++i) {
          some[i][j] = Panel<T>::add(Product::load_some(a + i * a_stride + p, count), right, some[i][j]);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kAtOnce; ++j) sum[i][first + j] = some[i][j];
    }
  }
  for (int i = 0; i < kRows; ++i) sum_lanes_of_four(sum[i], block.sums + i * kNtColumns);
}

template <typename T>
using NtTile = void (*)(const NtBlock<T>& block);

template <typename T, int kAhead>
NtTile<T> nt_tile_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr NtTile<T> tiles[] = {&nt_tile<T, i + 1, kAhead>...};
    return tiles[rows - 1];
  }(std::make_integer_sequence<int, kNtRows>{});
}

template <typename T>
NtTile<T> nt_stream_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr NtTile<T> tiles[] = {&nt_stream<T, i + 1>...};
    return tiles[rows - 1];
  }(std::make_integer_sequence<int, kNtStreamRows<T>>{});
}

// Returns a pointer to `rows` rows of A, from row `first` on, and their stride. The rows begin at step p of k and are
// elements of NtProduct<T>::Row. The pointer is into A if its elements have that type and the rows are consecutive;
// otherwise the rows are copied to `scratch`.
template <typename T>
PYMOE_INLINE std::pair<const typename NtProduct<T>::Row*, int64_t> nt_rows(const Gemm<T>& g, int64_t first,
                                                                           int64_t rows, int64_t p, int64_t k,
                                                                           typename NtProduct<T>::Row* scratch) {
  const int64_t begin = place_of(g.rows, first), stride = round_up(k, 16);
  if constexpr (std::is_same_v<typename NtProduct<T>::Row, T>) {
    bool in_order = true;
    for (int64_t i = 1; i < rows; ++i) in_order &= place_of(g.rows, first + i) == begin + i;
    if (in_order) return {g.a + begin * g.a_row_stride + p, g.a_row_stride};
  }
  for (int64_t i = 0; i < rows; ++i) {
    const T* from = g.a + place_of(g.rows, first + i) * g.a_row_stride + p;
    if constexpr (std::is_same_v<typename NtProduct<T>::Row, T>) {
      if (k > 0) memcpy(scratch + i * stride, from, static_cast<size_t>(k) * sizeof(T));
    } else {
      for_vectors<T>(
          k, [&](int64_t q, int count) { store_count(scratch + i * stride + q, load_count(from + q, count), count); });
    }
  }
  return {scratch, stride};
}

// Adds the bias to the sums of a pass, rounds them and writes them to C, four columns of all rows at a time.
template <typename T>
void nt_finish(const Gemm<T>& g, int64_t row, int64_t rows, int64_t first, int64_t end, const accumulate_t<T>* sum,
               const accumulate_t<T>* bias) {
  for (int64_t j = first; j < end; j += kNtColumns) {
    const int64_t columns = std::min<int64_t>(kNtColumns, g.n - j);
    for (int64_t i = row; i < row + rows; ++i, sum += kNtColumns) {
      T* to = g.c + place_of(g.rows, i) * g.c_row_stride + j;
      if (columns == kNtColumns) {
        for (int c = 0; c < kNtColumns; c += baseline::kStep<T>) {
          baseline::store(to + c, baseline::load(bias + j + c) + baseline::load(sum + c));
        }
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c] = round_to<T>(bias[j + c] + sum[c]);
      }
    }
  }
}

template <typename T>
void gemm_nt(const Gemm<T>& g) {
  using S = accumulate_t<T>;
  using Row = typename NtProduct<T>::Row;
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  constexpr auto kRowSize = static_cast<int64_t>(sizeof(Row));
  const int64_t part_k = std::min(g.k, kNtLineBytes / kRowSize);
  const bool streams = g.m <= 2 || (g.m <= kNtStreamRows<T> && g.k * kRowSize <= kNtLineBytes);
  const int64_t passes = streams ? 1 : (g.m + kNtRows - 1) / kNtRows;
  const int64_t fitting = kNtBlockBytes<T> / (std::max<int64_t>(1, g.k) * kSize) / kNtColumns * kNtColumns;
  const int64_t block = streams ? kNtColumns : std::clamp<int64_t>(fitting, 4 * kNtColumns, 64 * kNtColumns);
  const int64_t block_k = std::max<int64_t>(1, streams ? g.k : part_k);

  const int64_t tile_rows = streams ? g.m : kNtRows;
  S* memory = static_cast<S*>(gemm_buffer().reserve(static_cast<int64_t>(sizeof(S)) *
                                                    (tile_rows * block * (1 + kLanes<S>)+round_up(g.n, kNtColumns) +
                                                     tile_rows * round_up(std::min(block_k, g.k), 16) + 4 * 16)));
  S* lanes = carve(memory, tile_rows * block * kLanes<S>);
  S* sums = carve(memory, tile_rows * block);
  S* bias = carve(memory, round_up(g.n, kNtColumns));
  Row* widened = reinterpret_cast<Row*>(memory);
  widen_bias(g, round_up(g.n, kNtColumns), bias);

  const Row* a = nullptr;
  int64_t a_stride = 0;
  const auto distance = static_cast<uintptr_t>(
      (streams ? (kNtStreamAhead + block_k * kSize - 1) / (block_k * kSize) : block) * g.b_column_stride * kSize);
  for (int64_t first = 0; first < g.n; first += block) {
    const int64_t end = std::min(g.n, first + block);
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t rows = (g.m - row + passes - pass - 1) / (passes - pass);  // as equal as possible
      const auto tile = streams       ? nt_stream_for<T>(rows)
                        : passes == 1 ? nt_tile_for<T, 4>(rows)
                                      : nt_tile_for<T, 2>(rows);
      // In each step, one line per column (there are four) could be prefetched for the next block. A single pass over B
      // prefetches all four lines, each of two or three passes two, and each of more passes one.
      const int64_t lines = passes == 1 ? 4 : passes < 4 ? 2 : 1, line = std::min(pass * lines, kNtColumns - lines);
      int64_t p = 0;
      do {
        const int64_t k = std::min(block_k, g.k - p);
        NtBlock<T> part;
        part.k = k;
        if (!streams || first == 0) std::tie(a, a_stride) = nt_rows(g, row, rows, p, k, widened);
        part.a = a;
        part.a_stride = a_stride;
        part.distance = distance;
        part.first = p == 0;
        part.last = p + k == g.k;
        for (int64_t j = first; j < end; j += kNtColumns) {
          for (int64_t c = 0; c < kNtColumns; ++c) part.b[c] = g.b + std::min(j + c, g.n - 1) * g.b_column_stride + p;
          for (int64_t c = 0; c < kNtColumns; ++c) {
            part.ahead[c] =
                reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(part.b[line + c % lines]) + distance);
          }
          part.lanes = reinterpret_cast<vector_t<T>*>(lanes + (j - first) * rows * kLanes<S>);
          part.sums = sums + (j - first) * rows;
          tile(part);
        }
        p += k;
      } while (p < g.k);
      nt_finish(g, row, rows, first, end, sums, bias);
      row += rows;
    }
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
