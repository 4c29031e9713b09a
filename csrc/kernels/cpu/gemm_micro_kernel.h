// The innermost loop of gemm: a tile of C in registers (see gemm.h; no include guard on purpose).
//
// The tile is nearly as large as the registers allow, so that a step of k, which loads kTileVectors vectors of B and
// broadcasts kTileRows elements of A, performs many multiply-adds: the tile takes 6 x 2 of AVX2's 16 vector registers,
// 14 x 2 of AVX-512's 32, 12 x 2 of NEON's 32, and 4 x 2 of SSE2's 16 (SSE2 has no fused multiply-add and needs a
// register for the product).

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4
inline constexpr int kTileRows = 14;
#elif PYMOE_ISA_LEVEL == 3
inline constexpr int kTileRows = 6;
#elif PYMOE_NEON
inline constexpr int kTileRows = 12;  // a multiple of the number of lanes
#else
inline constexpr int kTileRows = 4;
#endif
inline constexpr int kTileVectors = 2;

template <typename S>
inline constexpr int kTileColumns = kTileVectors * kLanes<S>;

#if PYMOE_ISA_LEVEL == 4
PYMOE_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm512_fmadd_ps(a, b, c); }
PYMOE_INLINE vdouble multiply_add(vdouble a, vdouble b, vdouble c) { return (vdouble)_mm512_fmadd_pd(a, b, c); }
#elif PYMOE_ISA_LEVEL == 3
PYMOE_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm256_fmadd_ps(a, b, c); }
PYMOE_INLINE vdouble multiply_add(vdouble a, vdouble b, vdouble c) { return (vdouble)_mm256_fmadd_pd(a, b, c); }
#elif PYMOE_NEON
PYMOE_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) { return (vfloat)vfmaq_f32(c, a, b); }
PYMOE_INLINE vdouble multiply_add(vdouble a, vdouble b, vdouble c) { return (vdouble)vfmaq_f64(c, a, b); }
#else
PYMOE_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) { return a * b + c; }
PYMOE_INLINE vdouble multiply_add(vdouble a, vdouble b, vdouble c) { return a * b + c; }
#endif

// The elements of panels, and how they are multiplied. A panel element represents kDepth elements of T along k: one,
// widened to the type of the sums, or two if an instruction multiplies pairs.
template <typename T>
struct Panel {
  using Element = accumulate_t<T>;
  static constexpr int kDepth = 1;
  static PYMOE_INLINE vector_t<T> load(const Element* source) { return PYMOE_ISA::load(source); }
  static PYMOE_INLINE vector_t<T> broadcast(Element value) { return PYMOE_ISA::broadcast(value); }
  static PYMOE_INLINE vector_t<T> add(vector_t<T> a, vector_t<T> b, vector_t<T> sum) { return multiply_add(a, b, sum); }
};

#if PYMOE_ISA_HAS_BF16
// vdpbf16ps adds two exact products per lane, one after the other, and rounds each sum to nearest even. It treats
// subnormal operands as zero and gives zero for subnormal sums.
template <>
struct Panel<BFloat16> {
  using Element = uint32_t;  // the lower half holds the element that comes first along k
  static constexpr int kDepth = 2;
  static PYMOE_INLINE vfloat load(const Element* source) { return (vfloat)_mm512_loadu_si512(source); }
  static PYMOE_INLINE vfloat broadcast(Element value) { return (vfloat)_mm512_set1_epi32(static_cast<int>(value)); }
  static PYMOE_INLINE vfloat add(vfloat a, vfloat b, vfloat sum) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <typename T>
using panel_t = typename Panel<T>::Element;

inline constexpr int64_t kAskEvery = 4;  // steps

// Prefetches the part of B that is read next, as rows of contiguous elements, a few cache lines at a time, while an
// earlier part is multiplied, so that memory accesses and arithmetic overlap.
class RowsAhead {
 public:
  RowsAhead() = default;

  // `pauses`: the expected number of calls of `ask`, over which the lines are spread.
  template <typename T>
  RowsAhead(const T* begin, int64_t row_size, int64_t row_stride, int64_t rows, int64_t pauses)
      : line_(reinterpret_cast<uintptr_t>(begin)),
        row_bytes_(static_cast<uintptr_t>(row_size) * sizeof(T)),
        row_stride_(static_cast<uintptr_t>(row_stride) * sizeof(T)),
        row_end_(line_ + row_bytes_),
        rows_(rows),
        at_once_((static_cast<int64_t>(row_bytes_ + 63) / 64 * rows + pauses - 1) / std::max<int64_t>(1, pauses)) {}

  PYMOE_INLINE void ask() {
    for (int64_t i = 0; i < at_once_ && rows_ > 0; ++i) {
      __builtin_prefetch(reinterpret_cast<const char*>(line_), 0, 2);
      line_ += 64;
      if (line_ >= row_end_) {
        row_end_ += row_stride_;
        line_ = row_end_ - row_bytes_;
        --rows_;
      }
    }
  }

 private:
  uintptr_t line_ = 0;  // an integer, as there may be no memory after the last row
  uintptr_t row_bytes_ = 0;
  uintptr_t row_stride_ = 0;
  uintptr_t row_end_ = 0;
  int64_t rows_ = 0;
  int64_t at_once_ = 0;
};

// Adds the products along k steps of two packed panels, `a` of kTileRows rows and `b` of kTileColumns columns, to a
// tile of sums: sum[i] += sum over p of a[p][i] * b[p].
template <typename T, int kRows>
PYMOE_INLINE void multiply_panels(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const panel_t<T>* PYMOE_RESTRICT b,
                                  RowsAhead& ahead, vector_t<T> (&sum)[kRows][kTileVectors]) {
  using S = accumulate_t<T>;
  const auto step = [&]() __attribute__((always_inline)) {
    vector_t<T> right[kTileVectors];
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) right[j] = Panel<T>::load(b + j * kLanes<S>);
#if PYMOE_NEON  // NEON's multiply-adds can take one factor from a lane of a vector
    vector_t<T> lefts[(kRows + kLanes<S> - 1) / kLanes<S>];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; i += kLanes<S>) {
      lefts[i / kLanes<S>] = Panel<T>::load(a + i);
      asm("" : "+w"(lefts[i / kLanes<S>]));  // gcc 12 would load each lane into an integer register
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#if PYMOE_NEON
      const vector_t<T> left = Panel<T>::broadcast(lefts[i / kLanes<S>][i % kLanes<S>]);
#else
      const vector_t<T> left = Panel<T>::broadcast(a[i]);
#endif
#pragma GCC unroll 16
      for (int j = 0; j < kTileVectors; ++j) sum[i][j] = Panel<T>::add(left, right[j], sum[i][j]);
    }
    a += kTileRows;
    b += kTileColumns<S>;
  };
  int64_t p = 0;
  for (; p + kAskEvery <= k; p += kAskEvery) {
    ahead.ask();
#pragma GCC unroll 4
    for (int64_t i = 0; i < kAskEvery; ++i) step();
  }
  for (; p < k; ++p) step();
}

// Computes c[i][j] = start[i][j] + sum over p of a[p][i] * b[p][j] for j < columns and every row i of the tile. `a` is
// a packed panel of kTileRows rows, `b` one of kTileColumns columns. `start` is either c itself or a single row of
// initial values (stride 0).
template <typename T>
using MicroKernel = void (*)(int64_t k, const panel_t<T>* a, const panel_t<T>* b, const accumulate_t<T>* start,
                             int64_t start_stride, accumulate_t<T>* c, int64_t c_stride, int columns, RowsAhead& ahead);

template <typename T, int kRows>
void micro_kernel(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const panel_t<T>* PYMOE_RESTRICT b,
                  const accumulate_t<T>* start, int64_t start_stride, accumulate_t<T>* c, int64_t c_stride, int columns,
                  RowsAhead& ahead) {
  using S = accumulate_t<T>;
  using Vector = vector_t<S>;
  constexpr int kWidth = kLanes<S>;
  Vector sum[kRows][kTileVectors] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) __builtin_prefetch(c + i * c_stride, 1);
  multiply_panels<T>(k, a, b, ahead, sum);
  if (columns == kTileColumns<S>) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kTileVectors; ++j) {
        store(c + i * c_stride + j * kWidth, load(start + i * start_stride + j * kWidth) + sum[i][j]);
      }
    }
    return;
  }
  S whole[kRows][kTileColumns<S>];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) store(&whole[i][j * kWidth], sum[i][j]);
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < columns; ++j) c[i * c_stride + j] = start[i * start_stride + j] + whole[i][j];
  }
}

// Calls run(tile, stride) on a tile of C whose rows are stored in `order` (null: consecutively). The tile is C itself
// if the rows are consecutive, otherwise a copy, which is written back: kernels need not handle orders. `reads`: run()
// reads C's former content.
template <typename S, typename E, typename Run>
PYMOE_INLINE void for_tile(E* c, int64_t c_stride, const int32_t* order, int64_t rows, int64_t columns, bool reads,
                           const Run& run) {
  if (order == nullptr) return run(c, c_stride);
  bool follow = true;
  for (int64_t i = 1; i < rows; ++i) follow &= order[i] == order[0] + i;
  if (follow) return run(c + order[0] * c_stride, c_stride);
  constexpr int64_t kStride = kTileColumns<S>;
  const size_t bytes = static_cast<size_t>(columns) * sizeof(E);
  E copy[kTileRows * kStride];
  for (int64_t i = 0; reads && i < rows; ++i) memcpy(copy + i * kStride, c + order[i] * c_stride, bytes);
  run(copy, kStride);
  for (int64_t i = 0; i < rows; ++i) memcpy(c + order[i] * c_stride, copy + i * kStride, bytes);
}

// Returns the kernel for tiles of `rows` rows, 1 <= rows <= kTileRows. (Tiles at C's lower edge have fewer than
// kTileRows rows.)
template <typename T>
MicroKernel<T> micro_kernel_for(int rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr MicroKernel<T> kernels[] = {&micro_kernel<T, i + 1>...};
    return kernels[rows - 1];
  }(std::make_integer_sequence<int, kTileRows>{});
}

}  // namespace pymoe::cpu::PYMOE_ISA
