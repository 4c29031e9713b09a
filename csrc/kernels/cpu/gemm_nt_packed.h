// The sums of gemm_nt from packed panels, for many rows (see gemm.h; no include guard on purpose).
//
// In gemm_nt, a lane of a vector sums every 16th element or pair along k (every 8th with AVX2), and B is read again for
// every few rows of A, which exceeds the bandwidth of the second-level cache. Here, panels store all elements of one
// lane, then those of the next. A tile of the micro-kernel's size is multiplied lane by lane, and the lanes' sums of an
// element are added in the order of sum_lanes_of_four. So both files compute the same bits for a row of C.

namespace pymoe::cpu::PYMOE_ISA {

template <typename T>
inline constexpr bool kNtPacks = PYMOE_ISA_LEVEL >= 3 && std::is_same_v<accumulate_t<T>, float>;

// Returns true for the shapes in which gemm_nt_packed was faster than gemm_nt on a Zen 5, with AVX2 and with AVX-512:
// many rows or, in some cases, fewer rows with a large k. (Panels of widened elements take more memory than the
// elements themselves, so they need many rows.)
template <typename T>
constexpr bool nt_packs(int64_t m, int64_t k) {
  constexpr int64_t kMany = 64, kSome = 16, kLong = 2048;
  constexpr bool kCompact = PYMOE_ISA_LEVEL == 4 && sizeof(T) * Panel<T>::kDepth == 4;
  return k > 0 && (m >= kMany || (kCompact && m >= kSome && k >= kLong));
}

#if PYMOE_ISA_LEVEL >= 3
inline constexpr int kLaneCount = kLanes<float>;
inline constexpr int64_t kNtPackedBytes = 2 << 20;  // largest size of the panels of A in bytes, unless eight take more

// The lanes in the order in which sum_lanes_of_four adds them: each to its neighbour, then the neighbouring sums, and
// so on.
#if PYMOE_ISA_LEVEL == 4
inline constexpr int kLaneOrder[kLaneCount] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
#else
inline constexpr int kLaneOrder[kLaneCount] = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

// The layout of panels of kPanel items with k elements of T each. An item's k elements are cut into vectors, and
// element (or pair) l of each vector is multiplied in lane l: for vector p of item i, it is at [l][p][i]. Every lane
// has room for lane_stride(k) vectors: one or two more than needed, because the last store may write more than its
// vector, and an odd number, so that the lanes do not share a few sets of the first-level cache.
template <typename T>
struct LanePanels {
  static constexpr int64_t kElements = NtProduct<T>::kElements;
  static int64_t steps(int64_t k) { return (k + kElements - 1) / kElements; }
  static int64_t lane_stride(int64_t k) { return (steps(k) + 1) | 1; }
  template <int kPanel>
  static int64_t size(int64_t k) {
    return kLaneCount * lane_stride(k) * kPanel;
  }
};

// Packs one panel: items order[0], order[1], ... (nullptr: 0, 1, ...). Missing items are copies of the last one, since
// their results are never read; missing steps of k are zeros.
template <int kPanel, typename T>
void pack_lanes(const T* source, int64_t item_stride, int64_t items, int64_t k, panel_t<T>* target,
                const int32_t* order = nullptr) {
  constexpr int64_t kElements = LanePanels<T>::kElements;
  const int64_t stride = LanePanels<T>::lane_stride(k) * kPanel;
  for (int first = 0; first < kPanel; first += kLaneCount) {
    const T* rows[kLaneCount];
    for (int i = 0; i < kLaneCount; ++i) {
      rows[i] = source + place_of(order, std::min<int64_t>(first + i, items - 1)) * item_stride;
    }
    panel_t<T>* to = target + first;
    const auto pack_step = [&](const auto& load_at) __attribute__((always_inline)) {
      vfloat block[kLaneCount];
#pragma GCC unroll 16
      for (int i = 0; i < kLaneCount; ++i) block[i] = load_at(rows[i]);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLaneCount; ++i) store_panel<T>(to + i * stride, block[i]);
      to += kPanel;
    };
    int64_t p = 0;
    for (; p + kElements <= k; p += kElements) {
      pack_step([p](const T* row) __attribute__((always_inline)) { return NtProduct<T>::load_some(row + p); });
    }
    if (p < k) {
      const int left = static_cast<int>(k - p);
      pack_step([=](const T* row) __attribute__((always_inline)) { return NtProduct<T>::load_some(row + p, left); });
    }
  }
}

template <typename T>
using NtPackedTile = void (*)(int64_t k, const panel_t<T>* a, const panel_t<T>* b, const float* bias, T* c,
                              int64_t c_stride, int columns, RowsAhead& ahead);

// Computes c[i][j] = bias[j] + <row i of A, column j of B> for i < kRows and j < columns.
template <typename T, int kRows>
void nt_packed_tile(int64_t k, const panel_t<T>* PYMOE_RESTRICT a, const panel_t<T>* PYMOE_RESTRICT b,
                    const float* bias, T* c, int64_t c_stride, int columns, RowsAhead& ahead) {
  constexpr int kColumns = kTileColumns<float>, kDepth = 4;  // kDepth: most waiting sums, for up to 2^4 lanes
  const int64_t steps = LanePanels<T>::steps(k), stride = LanePanels<T>::lane_stride(k);
  vfloat waiting[kDepth][kRows][kTileVectors];  // sums whose neighbours are not computed yet
  int depth = 0;
  vfloat sum[kRows][kTileVectors];
  const auto for_tile = [&](const auto& what) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kTileVectors; ++j) what(i, j);
    }
  };
  for (int number = 0; number < kLaneCount; ++number) {
    const int64_t lane = kLaneOrder[number] * stride;
    for_tile([&](int i, int j) __attribute__((always_inline)) { sum[i][j] = vfloat{}; });
    multiply_panels<T>(steps, a + lane * kTileRows, b + lane * kColumns, ahead, sum);
    for (int added = number; added % 2 == 1; added /= 2) {
      --depth;
      for_tile([&](int i, int j) __attribute__((always_inline)) { sum[i][j] = waiting[depth][i][j] + sum[i][j]; });
    }
    if (number + 1 < kLaneCount) {
      for_tile([&](int i, int j) __attribute__((always_inline)) { waiting[depth][i][j] = sum[i][j]; });
      ++depth;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    T whole[kColumns];
    T* to = columns == kColumns ? c + i * c_stride : whole;
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) store(to + j * kLaneCount, load(bias + j * kLaneCount) + sum[i][j]);
    if (columns < kColumns) memcpy(c + i * c_stride, whole, static_cast<size_t>(columns) * sizeof(T));
  }
}

template <typename T>
NtPackedTile<T> nt_packed_tile_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr NtPackedTile<T> tiles[] = {&nt_packed_tile<T, i + 1>...};
    return tiles[rows - 1];
  }(std::make_integer_sequence<int, kTileRows>{});
}

template <typename T>
void gemm_nt_packed(const Gemm<T>& g) {
  using Panels = LanePanels<T>;
  constexpr int64_t kColumns = kTileColumns<float>;
  static_assert(sizeof(panel_t<T>) == sizeof(float));
  const int64_t panel_a = Panels::template size<kTileRows>(g.k), panel_b = Panels::template size<kColumns>(g.k);
  const int64_t tiles = (g.m + kTileRows - 1) / kTileRows;
  const int64_t most = std::clamp<int64_t>(kNtPackedBytes / (panel_a * static_cast<int64_t>(sizeof(float))), 8, 56);
  const int64_t blocks = (tiles + most - 1) / most, block_tiles = (tiles + blocks - 1) / blocks;
  const int64_t padded_columns = round_up(g.n, kColumns);
  auto* memory = static_cast<float*>(gemm_buffer().reserve(
      static_cast<int64_t>(sizeof(float)) * (block_tiles * panel_a + panel_b + padded_columns + 2 * 16 + kPackSlack)));
  auto* panels = reinterpret_cast<panel_t<T>*>(carve(memory, block_tiles * panel_a));
  auto* b = reinterpret_cast<panel_t<T>*>(carve(memory, panel_b + kPackSlack));
  float* bias = memory;
  widen_bias(g, padded_columns, bias);
  const auto row_of = [&](int64_t tile) { return g.m * tile / tiles; };  // so that tiles are as equal as possible
  for (int64_t begin = 0; begin < tiles; begin += block_tiles) {
    const int64_t end = std::min(tiles, begin + block_tiles);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = row_of(tile);
      pack_lanes<kTileRows>(g.a + move_to(g.rows, row, g.a_row_stride), g.a_row_stride, row_of(tile + 1) - row, g.k,
                            panels + (tile - begin) * panel_a, order_from(g.rows, row));
    }
    const int64_t pauses = (end - begin) * kLaneCount * (Panels::steps(g.k) / kAskEvery);
    for (int64_t j = 0; j < g.n; j += kColumns) {
      const int64_t columns = std::min(kColumns, g.n - j), next = std::min(j + columns, g.n - 1);
      pack_lanes<kColumns>(g.b + j * g.b_column_stride, g.b_column_stride, columns, g.k, b);
      RowsAhead ahead(g.b + next * g.b_column_stride, g.k, g.b_column_stride, std::min(kColumns, g.n - j - columns),
                      pauses);
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t row = row_of(tile), rows = row_of(tile + 1) - row;
        for_tile<float>(g.c + move_to(g.rows, row, g.c_row_stride) + j, g.c_row_stride, order_from(g.rows, row), rows,
                        columns, false, [&](T* c, int64_t stride) {
                          nt_packed_tile_for<T>(rows)(g.k, panels + (tile - begin) * panel_a, b, bias + j, c, stride,
                                                      static_cast<int>(columns), ahead);
                        });
      }
    }
  }
}
#endif

}  // namespace pymoe::cpu::PYMOE_ISA
