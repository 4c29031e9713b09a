// The loops of gemm for few rows and a B whose rows are contiguous (see gemm.h; no include guard on purpose).
//
// Packing B costs as much as multiplying it by several rows, so for so few B is read where it lies, and once. Sums are
// those of the micro-kernel bit for bit: a row of C must not depend on how many rows there are.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr int kInPlaceRows = PYMOE_ISA_LEVEL == 4 ? 12 : kTileRows;
inline constexpr int64_t kInPlaceBytes = 16 << 10;  // of sums, which stay in the first-level cache

// sums[i * columns + j] = sum over p of a[p][i] * b[p][j] for a packed panel `a` and k rows of B, of which the last
// step may have one less than kDepth.
template <typename T>
using InPlaceKernel = void (*)(int64_t k, const panel_t<T>* a, const T* b, int64_t b_row_stride, int64_t columns,
                               accumulate_t<T>* sums);

// How many rows in_place_linear takes: as long as it was faster than strips on a Zen 5.
template <typename T>
inline constexpr int kInPlaceLinearRows = Panel<T>::kDepth == 2 ? 1 : 2;

// For one or two rows: a few rows of B at a time, along all columns, which is how memory gives most.
template <typename T, int kRows>
void in_place_linear(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const T* PYMOE_RESTRICT b, int64_t b_row_stride,
                     int64_t columns, accumulate_t<T>* PYMOE_RESTRICT sums) {
  constexpr int kDepth = Panel<T>::kDepth, kMost = 4;
  std::fill(sums, sums + kRows * columns, accumulate_t<T>{});
  const auto run = [&]<int kSteps>(std::integral_constant<int, kSteps>, int64_t p) __attribute__((always_inline)) {
    const T* rows = b + p * b_row_stride;
    const panel_t<T>* left = a + p / kDepth * kTileRows;
    for (int64_t j = 0; j < columns; j += 2 * kStep<T>) {
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

// Vectors of a strip: all sums, and one step of B, in registers.
constexpr int strip_vectors(int rows) {
  const int registers = PYMOE_ISA_LEVEL == 4 ? 24 : PYMOE_ISA_LEVEL == 3 ? 12 : 8;
  return rows * 8 <= registers ? 8 : rows * 4 <= registers ? 4 : rows * 3 <= registers ? 3 : 2;
}

// For more rows: strips of columns whose sums stay in registers. Lines a few steps of k ahead are asked for, because a
// strip's next one lies a whole row of B away. `columns` are those of a strip.
template <typename T, int kRows>
void in_place_strip(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const T* PYMOE_RESTRICT b, int64_t b_row_stride,
                    int64_t columns, accumulate_t<T>* PYMOE_RESTRICT sums) {
  constexpr int kWidth = kStep<T>, kVectors = strip_vectors(kRows), kDepth = Panel<T>::kDepth;
  constexpr int kPerLine = 64 / (kWidth * static_cast<int>(sizeof(T)));  // vectors of B in a line, or 0
  constexpr int64_t kAhead = 12;                                         // rows of B
  vector_t<T> sum[kRows][kVectors] = {};
  for (int64_t p = 0; p < k; p += kDepth) {
    const auto* far = reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(b) +
                                                 static_cast<uintptr_t>(kAhead * b_row_stride) * sizeof(T));
    vector_t<T> right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j + 1 < kVectors; j += 2) load_two(b + j * kWidth, b_row_stride, k - p, right + j);
    if constexpr (kVectors % 2 == 1) {
      right[kVectors - 1] = panel_vector(b + (kVectors - 1) * kWidth, b_row_stride, k - p);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j += std::max(1, kPerLine)) {
      for (int row = 0; row < kDepth; ++row) __builtin_prefetch(far + row * b_row_stride + j * kWidth, 0, 2);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vector_t<T> left = Panel<T>::broadcast(a[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Panel<T>::add(left, right[j], sum[i][j]);
    }
    a += kTileRows;
    b += kDepth * b_row_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) store(sums + i * columns + j * kWidth, sum[i][j]);
  }
}

template <typename T, int kRows>
constexpr InPlaceKernel<T> in_place_kernel() {
  if constexpr (kRows <= kInPlaceLinearRows<T>) {
    return &in_place_linear<T, kRows>;
  } else {
    return &in_place_strip<T, kRows>;
  }
}

template <typename T>
struct InPlace {
  InPlaceKernel<T> kernel;
  int64_t columns;  // at a time: the most for rows in linear order, exactly those of a strip
  int64_t multiple;
};

// The kernel for `rows` rows, 1 <= rows <= kInPlaceRows, and how many columns it takes.
template <typename T>
InPlace<T> in_place_for(int64_t rows) {
  const auto kernel = [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr InPlaceKernel<T> kernels[] = {in_place_kernel<T, i + 1>()...};
    return kernels[rows - 1];
  }(std::make_integer_sequence<int, kInPlaceRows>{});
  if (rows > kInPlaceLinearRows<T>) {
    const int64_t strip = strip_vectors(static_cast<int>(rows)) * kStep<T>;
    return {kernel, strip, strip};
  }
  const int64_t fitting = kInPlaceBytes / static_cast<int64_t>(sizeof(accumulate_t<T>)) / rows;
  return {kernel, fitting / (2 * kStep<T>)*(2 * kStep<T>), 2 * kStep<T>};
}

}  // namespace pymoe::cpu::PYMOE_ISA
