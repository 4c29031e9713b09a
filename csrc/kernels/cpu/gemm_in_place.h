// The loops of gemm for few rows and a B whose rows are contiguous (see gemm.h; no include guard on purpose).
//
// Packing B costs as much as multiplying it by several rows, so for few rows B is read in place: from memory for the
// first panel of A, and from the second-level cache for the others. Sums equal those of the micro-kernel bit for bit,
// because a row of C must not depend on the number of rows.

namespace pymoe::cpu::PYMOE_ISA {

// Largest number of rows for which reading B in place was faster than packing it, on a Zen 5.
inline constexpr int kInPlaceRows = 4 * kTileRows;
inline constexpr int64_t kInPlaceBytes = 16 << 10;  // most bytes of sums, so that they stay in the first-level cache

// Computes sums[i * columns + j] = sum over p of a[p][i] * b[p][j] for a packed panel `a` and k rows of B, where k need
// not be a multiple of kDepth. `columns` must be a multiple of kInPlaceMultiple.
template <typename T>
using InPlaceKernel = void (*)(int64_t k, const panel_t<T>* a, const T* b, int64_t b_row_stride, int64_t columns,
                               accumulate_t<T>* sums);

template <typename T>
inline constexpr int64_t kInPlaceMultiple = 2 * kStep<T>;

// For up to this many rows of a panel of A, B is read faster without prefetch instructions, by the hardware prefetcher
// alone. For 16-bit elements, prefetch instructions are always faster.
template <typename T>
inline constexpr int kUnaidedRows = (PYMOE_ISA_LEVEL == 4 ? 2 : 1) * (sizeof(T) >= 4);

// Takes a few rows of B at a time, multiplies them along all columns, and prefetches the next few rows meanwhile.
template <typename T, int kRows>
void in_place_kernel(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const T* PYMOE_RESTRICT b, int64_t b_row_stride,
                     int64_t columns, accumulate_t<T>* PYMOE_RESTRICT sums) {
  constexpr int kDepth = Panel<T>::kDepth, kMost = 4, kWidth = static_cast<int>(kInPlaceMultiple<T>);
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  std::fill(sums, sums + kRows * columns, accumulate_t<T>{});
  const auto run = [&]<int kSteps>(std::integral_constant<int, kSteps>, int64_t p) __attribute__((always_inline)) {
    const T* rows = b + p * b_row_stride;
    const panel_t<T>* left = a + p / kDepth * kTileRows;
    // An integer, because a pointer past B's memory would be invalid: there may be no next row.
    const auto next =
        reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(kSteps * kDepth * b_row_stride) * sizeof(T);
    for (int64_t j = 0; j < columns; j += kWidth) {
      if (kRows > kUnaidedRows<T> && kSteps == kMost && (kWidth % kLine == 0 || j % kLine == 0)) {
#pragma GCC unroll 8
        for (int row = 0; row < kMost * kDepth; ++row) {
#pragma GCC unroll 2
          for (int line = 0; line < kWidth; line += kLine) {
            __builtin_prefetch(reinterpret_cast<const T*>(next) + row * b_row_stride + j + line, 0, 3);
          }
        }
      }
      vector_t<T> right[kSteps][2];
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        load_two(rows + step * kDepth * b_row_stride + j, b_row_stride, k - p - step * kDepth, right[step]);
      }
#pragma GCC unroll 2
      for (int i = 0; i < kRows; ++i) {
        accumulate_t<T>* to = sums + i * columns + j;
        vector_t<T> first = load(to), second = load(to + kStep<T>);
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; ++step) {
          const vector_t<T> one = Panel<T>::broadcast(left[step * kTileRows + i]);
          first = Panel<T>::add(one, right[step][0], first);
          second = Panel<T>::add(one, right[step][1], second);
        }
        store(to, first);
        store(to + kStep<T>, second);
      }
    }
  };
  int64_t p = 0;
  for (; p + kMost * kDepth <= k; p += kMost * kDepth) run(std::integral_constant<int, kMost>{}, p);
  for (; p < k; p += kDepth) run(std::integral_constant<int, 1>{}, p);
}

// Returns the kernel for a panel of `rows` rows, 1 <= rows <= kTileRows.
template <typename T>
InPlaceKernel<T> in_place_kernel_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr InPlaceKernel<T> kernels[] = {&in_place_kernel<T, i + 1>...};
    return kernels[rows - 1];
  }(std::make_integer_sequence<int, kTileRows>{});
}

// Returns the number of columns of B that a panel of `rows` rows multiplies at a time; 0 if `columns`, the number of
// columns of B, is too small.
template <typename T>
int64_t in_place_columns(int64_t rows, int64_t columns) {
  const int64_t fitting = kInPlaceBytes / static_cast<int64_t>(sizeof(accumulate_t<T>)) / rows;
  return std::min(fitting, columns) / kInPlaceMultiple<T> * kInPlaceMultiple<T>;
}

}  // namespace pymoe::cpu::PYMOE_ISA
