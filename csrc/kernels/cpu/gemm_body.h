// The loops of gemm around the micro-kernel (see gemm.h; no include guard on purpose).
//
// For every block of k and every block of rows: pack A, then multiply every panel of B, which stays in the first-level
// cache, by every panel of A, which is read from the second-level cache. The first block of rows packs B, a few panels
// at a time; if it is the only block, only these few panels are kept. The length of a block of k is fixed, so an
// element is the same sum of partial sums however C is cut.
// clang-format off: each depends on those before it
#include "kernels/cpu/gemm_micro_kernel.h"
#include "kernels/cpu/gemm_pack.h"
#include "kernels/cpu/gemm_in_place.h"
#include "kernels/cpu/gemm_nt.h"
#include "kernels/cpu/gemm_nt_packed.h"
#if PYMOE_ISA_HAS_BF16
#include "kernels/cpu/gemm_amx.h"
#endif
// clang-format on

namespace pymoe::cpu::PYMOE_ISA {

// A panel of B (kBlockK x kTileColumns) takes half of a 32 KiB first-level cache, or three quarters with AVX-512, whose
// products take longer than the loads. A block of A (kBlockRows x kBlockK) takes a quarter of a 1 MiB second-level
// cache.
inline constexpr int64_t kPanelBytes = PYMOE_ISA_LEVEL == 4 ? 24576 : 16384;
template <typename S>
inline constexpr int64_t kBlockK = kPanelBytes / (kTileColumns<S> * static_cast<int64_t>(sizeof(S)));
template <typename S>
inline constexpr int64_t kBlockRows =
    int64_t{262144} / (kBlockK<S> * static_cast<int64_t>(sizeof(S))) / kTileRows * kTileRows;

template <typename T>
void gemm(const Gemm<T>& g) {
  // If k is 1, A with one column and B with one row are contiguous both along and across k. They count as contiguous
  // across k.
  if (g.a_column_stride == 1 && g.b_row_stride == 1 && !(g.a_row_stride == 1 && g.b_column_stride == 1)) {
    if constexpr (kNtPacks<T>) {
      if (nt_packs<T>(g.m, g.k)) return gemm_nt_packed(g);
    }
    return gemm_nt(g);
  }
  using S = accumulate_t<T>;
  using P = panel_t<T>;
  constexpr int64_t kColumns = kTileColumns<S>, kDepth = Panel<T>::kDepth;
  static_assert(kBlockK<S> <= kPackMaxDepth && sizeof(P) == sizeof(S));
  const int64_t padded_columns = round_up(g.n, kColumns);
  const int64_t block_depth = std::min((g.k + kDepth - 1) / kDepth, kBlockK<S>);
  const int64_t block_rows = std::min(round_up(g.m, kTileRows), kBlockRows<S>);

  // Number of columns of B that are packed at a time: one panel if B is contiguous along k, otherwise several, to read
  // whole cache lines and pages of B's rows.
  const int64_t ahead = g.b_row_stride == 1 ? kColumns : std::min(padded_columns, 8 * kColumns);
  const bool keeps_b = g.m > kBlockRows<S>;
  // Sums are kept in C itself if its type allows that. Otherwise they are kept in a buffer, and rounded at the end: a
  // buffer for one block of rows and one strip of columns if k is a single block, else for all of C.
  constexpr bool kInPlace = std::is_same_v<S, T>;
  const bool at_once = !kInPlace && g.k <= kBlockK<S> * kDepth, streams = at_once && g.leaves_cache;
  // Number of columns of B that are read in place at a time; 0 unless there are few rows and B's rows are contiguous.
  const int64_t in_place = g.m > 0 && g.m <= kInPlaceRows && g.b_column_stride == 1 && g.steps == nullptr
                               ? in_place_columns<T>(std::min<int64_t>(g.m, kTileRows), g.n)
                               : 0;
  const int64_t strip = std::max(kColumns, in_place);
  constexpr int64_t kPartial = kInPlaceBytes / static_cast<int64_t>(sizeof(S));
  const int64_t sums = kInPlace ? 0 : at_once ? block_rows * strip : g.m * padded_columns;
  auto* memory = static_cast<S*>(gemm_buffer().reserve(
      static_cast<int64_t>(sizeof(S)) *
      (block_depth * (padded_columns + block_rows) + padded_columns + sums + kPartial + 5 * 64 + 2 * kPackSlack)));
  P* panels_b = reinterpret_cast<P*>(carve(memory, block_depth * (keeps_b ? padded_columns : ahead) + kPackSlack));
  P* panels_a = reinterpret_cast<P*>(carve(memory, block_depth * block_rows + kPackSlack));
  S* bias = carve(memory, padded_columns);
  S* partial = carve(memory, kPartial);  // sums over a block of k, if B is read in place
  const int64_t c_stride = kInPlace ? g.c_row_stride : at_once ? strip : padded_columns;
  // Where the sums of the rows from `row` on are kept: sums_order returns the order of these rows in memory (null: one
  // after the other), and sums_of the pointer that goes with it, as order_from and move_to do.
  const auto sums_order = [&](int64_t row) { return kInPlace ? order_from(g.rows, row) : nullptr; };
  const auto sums_of = [&](int64_t row, int64_t column) {
    if constexpr (kInPlace) {
      return g.c + move_to(g.rows, row, c_stride) + column;
    } else {
      return at_once ? memory : memory + row * c_stride + column;
    }
  };
  const auto finish = [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const S* from = sums_of(row, column);
    for (int64_t i = row; i < row + rows; ++i, from += c_stride) {
      T* to = g.c + place_of(g.rows, i) * g.c_row_stride + column;
      streams ? stream_row(to, from, columns) : store_row(to, from, columns);
    }
  };
  widen_bias(g, padded_columns, bias);

  int64_t p = 0;
  do {
    const int64_t k = std::min(kBlockK<S> * kDepth, g.k - p), depth = (k + kDepth - 1) / kDepth;
    const int64_t start_stride = p == 0 ? 0 : c_stride;
    for (int64_t row = 0; row < g.m; row += kBlockRows<S>) {
      const int64_t rows = std::min(kBlockRows<S>, g.m - row);
      const int32_t* order = sums_order(row);
      pack<kTileRows>(g.a + move_to(g.rows, row, g.a_row_stride) + move_to(g.steps, p, g.a_column_stride),
                      g.a_row_stride, g.a_column_stride, rows, k, panels_a, order_from(g.rows, row),
                      order_from(g.steps, p));
      int64_t unpacked = 0;  // number of columns of B that were multiplied in place
      if (in_place > 0) {
        const int64_t all = g.n / kInPlaceMultiple<T> * kInPlaceMultiple<T>;
        for (int64_t columns; unpacked < all; unpacked += columns) {
          columns = std::min(in_place, all - unpacked);
          for (int64_t i = 0; i < g.m; i += kTileRows) {
            const int64_t tile_rows = std::min<int64_t>(kTileRows, g.m - i);
            in_place_kernel_for<T>(tile_rows)(k, panels_a + i * depth, g.b + p * g.b_row_stride + unpacked,
                                              g.b_row_stride, columns, partial);
            S* tile = sums_of(0, unpacked) + move_to(order, i, c_stride);
            const S* start = p == 0 ? bias + unpacked : tile;
            for (int64_t r = 0; r < tile_rows; ++r) {
              const int64_t place = place_of(order_from(order, i), r);
              for_vectors<S>(columns, [&](int64_t j, int) {
                store(tile + place * c_stride + j,
                      load(start + place * start_stride + j) + load(partial + r * columns + j));
              });
            }
          }
          if (at_once) finish(0, g.m, unpacked, columns);
        }
      }
      RowsAhead next{};
      for (int64_t j = unpacked; j < g.n; j += kColumns) {
        const int64_t at = j - unpacked;
        P* panel_b = panels_b + (keeps_b ? at : at % ahead) * depth;
        if (row == 0 && at % ahead == 0) {
          pack<kTileColumns<S>>(g.b + move_to(g.steps, p, g.b_row_stride) + j * g.b_column_stride, g.b_column_stride,
                                g.b_row_stride, std::min(ahead, g.n - j), k, panel_b, nullptr, order_from(g.steps, p));
          if (g.b_column_stride == 1) {
            // Prefetch the part of B that is packed next: the next columns, or the first columns of the next block of
            // k.
            const bool here = j + ahead < g.n;
            const int64_t column = here ? j + ahead : unpacked, begin = here ? p : p + k;
            const int64_t tiles = ahead / kColumns * ((rows + kTileRows - 1) / kTileRows);
            const int64_t place = begin < g.k ? place_of(g.steps, begin) : 0;
            next = {g.b + place * g.b_row_stride + column, std::min(ahead, g.n - column), g.b_row_stride,
                    here ? k : std::min(kBlockK<S> * kDepth, g.k - begin), tiles * (depth / kAskEvery)};
          }
        }
        const int columns = static_cast<int>(std::min(kColumns, g.n - j));
        for (int64_t i = 0; i < rows; i += kTileRows) {
          const int64_t tile_rows = std::min<int64_t>(kTileRows, rows - i);
          const auto kernel = micro_kernel_for<T>(static_cast<int>(tile_rows));
          for_tile<S>(sums_of(row, j) + move_to(order, i, c_stride), c_stride, order_from(order, i), tile_rows, columns,
                      p > 0, [&](S* tile, int64_t stride) {
                        kernel(depth, panels_a + i * depth, panel_b, p == 0 ? bias + j : tile, p == 0 ? 0 : stride,
                               tile, stride, columns, next);
                      });
        }
        if (at_once) finish(row, rows, j, columns);
      }
    }
    p += k;
  } while (p < g.k);

  if (!kInPlace && !at_once) finish(0, g.m, 0, g.n);
  if (streams) stream_fence();
}

}  // namespace pymoe::cpu::PYMOE_ISA
