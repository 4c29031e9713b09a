// The innermost loop of gemm for few rows and a B whose rows are contiguous (see gemm.h; no include guard on purpose).
//
// Packing B costs as much as multiplying it by several rows, so for so few B is read where it lies: once, in strips of
// two to eight vectors, while the sums of a strip stay in registers. Lines a few steps of k ahead are asked
// for, because a strip's next one lies a whole row of B away. Sums are those of the micro-kernel bit for bit: a row of
// C must not depend on how many rows there are.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr int kInPlaceRows = PYMOE_ISA_LEVEL == 4 ? 12 : kTileRows;
inline constexpr int64_t kInPlacePrefetch = 12;  // steps of k

// Vectors of a strip: all sums, and one step of B, in registers.
constexpr int in_place_vectors(int rows) {
  const int registers = PYMOE_ISA_LEVEL == 4 ? 24 : PYMOE_ISA_LEVEL == 3 ? 12 : 8;
  return rows * 8 <= registers ? 8 : rows * 4 <= registers ? 4 : rows * 3 <= registers ? 3 : 2;
}

// c[i][j] = start[i][j] + sum over p of a[p][i] * b[p][j] for a packed panel `a` and the elements of k of B's rows, of
// which the last step may have one less than kDepth, for i < kRows and the columns of a strip.
template <typename T, int kRows>
void in_place_kernel(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const T* PYMOE_RESTRICT b, int64_t b_row_stride,
                     const accumulate_t<T>* start, int64_t start_stride, accumulate_t<T>* c, int64_t c_stride) {
  using Vector = vector_t<T>;
  constexpr int kWidth = kStep<T>, kVectors = in_place_vectors(kRows), kDepth = Panel<T>::kDepth;
  constexpr int kPerLine = 64 / (kWidth * static_cast<int>(sizeof(T)));  // vectors of B in a line, or 0
  Vector sum[kRows][kVectors] = {};
  for (int64_t p = 0; p < k; p += kDepth) {
    const T* far = reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(b) +
                                              static_cast<uintptr_t>(kInPlacePrefetch * b_row_stride) * sizeof(T));
    Vector right[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      right[j] = panel_vector(b + j * kWidth, b_row_stride, k - p);
      if (kPerLine <= 1 || j % std::max(1, kPerLine) == 0) {
        for (int row = 0; row < kDepth; ++row) __builtin_prefetch(far + row * b_row_stride + j * kWidth, 0, 2);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector left = Panel<T>::broadcast(a[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Panel<T>::add(left, right[j], sum[i][j]);
    }
    a += kTileRows;
    b += kDepth * b_row_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      store(c + i * c_stride + j * kWidth, load(start + i * start_stride + j * kWidth) + sum[i][j]);
    }
  }
}

template <typename T>
struct InPlace {
  void (*kernel)(int64_t k, const panel_t<T>* a, const T* b, int64_t b_row_stride, const accumulate_t<T>* start,
                 int64_t start_stride, accumulate_t<T>* c, int64_t c_stride);
  int64_t columns;
};

// The kernel for `rows` rows, 1 <= rows <= kInPlaceRows, and the columns of its strips.
template <typename T>
InPlace<T> in_place_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr InPlace<T> kernels[] = {{&in_place_kernel<T, i + 1>, in_place_vectors(i + 1) * kStep<T>}...};
    return kernels[rows - 1];
  }(std::make_integer_sequence<int, kInPlaceRows>{});
}

}  // namespace pymoe::cpu::PYMOE_ISA
