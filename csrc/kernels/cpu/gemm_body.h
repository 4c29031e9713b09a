// The loops of gemm around the micro-kernel (see gemm.h; no include guard on purpose).
//
// For every block of k and every block of rows: pack A; for every panel of B, which stays in the first-level cache,
// multiply it with every panel of A, which stream from the second. B is packed by the first block of rows, a few panels
// ahead of their use; where that block is the only one, the few panels are all that is kept. The length of a block of k
// is fixed, so an element is the same sum of partial sums wherever C is cut.
#include "kernels/cpu/gemm_micro_kernel.h"
#include "kernels/cpu/gemm_pack.h"

namespace pymoe::cpu::PYMOE_ISA {

// A panel of B (kBlockK x kTileColumns) takes half of a 32 KiB first-level cache, or three quarters where the tile is
// wide and its products outlast the loads; a block of A (kBlockRows x kBlockK) a quarter of a 1 MiB second-level cache.
inline constexpr int64_t kPanelBytes = PYMOE_ISA_LEVEL == 4 ? 24576 : 16384;
template <typename S>
inline constexpr int64_t kBlockK = kPanelBytes / (kTileColumns<S> * static_cast<int64_t>(sizeof(S)));
template <typename S>
inline constexpr int64_t kBlockRows =
    int64_t{262144} / (kBlockK<S> * static_cast<int64_t>(sizeof(S))) / kTileRows * kTileRows;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <typename S>
PYMOE_INLINE S* carve(S*& memory, int64_t count) {
  S* begin = memory;
  memory += round_up(count, 64 / static_cast<int64_t>(sizeof(S)));
  return begin;
}

template <typename T>
void gemm(const Gemm<T>& g) {
  using S = accumulate_t<T>;
  constexpr bool kInPlace = sizeof(T) == sizeof(S);  // sums are kept in C itself
  constexpr int64_t kColumns = kTileColumns<S>;
  static_assert(kBlockK<S> <= kPackMaxK);
  const int64_t padded_columns = round_up(g.n, kColumns);
  const int64_t block_k = std::min(g.k, kBlockK<S>);
  const int64_t block_rows = std::min(round_up(g.m, kTileRows), kBlockRows<S>);

  // Rows of B that are contiguous in memory are read in longer pieces than one panel's: their lines and pages repay it.
  const int64_t ahead = g.b_row_stride == 1 ? kColumns : std::min(padded_columns, 8 * kColumns);
  const bool keeps_b = g.m > kBlockRows<S>;
  const int64_t sums = kInPlace ? 0 : g.m * padded_columns;
  auto* memory = static_cast<S*>(
      gemm_buffer().reserve(static_cast<int64_t>(sizeof(S)) * (block_k * (padded_columns + block_rows) +
                                                               padded_columns + sums + 4 * 64 + 2 * kPackSlack)));
  S* panels_b = carve(memory, block_k * (keeps_b ? padded_columns : ahead) + kPackSlack);
  S* panels_a = carve(memory, block_k * block_rows + kPackSlack);
  S* bias = carve(memory, padded_columns);
  S* c = memory;
  int64_t c_stride = padded_columns;
  if constexpr (kInPlace) {
    c = g.c;
    c_stride = g.c_row_stride;
  }
  for (int64_t j = 0; j < padded_columns; ++j) {
    bias[j] = g.bias != nullptr && j < g.n ? to_accumulate(g.bias[j * g.bias_stride]) : S{};
  }

  int64_t p = 0;
  do {
    const int64_t k = std::min(kBlockK<S>, g.k - p);
    for (int64_t row = 0; row < g.m; row += kBlockRows<S>) {
      const int64_t rows = std::min(kBlockRows<S>, g.m - row);
      pack<kTileRows>(g.a + row * g.a_row_stride + p * g.a_column_stride, g.a_row_stride, g.a_column_stride, rows, k,
                      panels_a);
      for (int64_t j = 0; j < g.n; j += kColumns) {
        S* panel_b = panels_b + (keeps_b ? j : j % ahead) * k;
        if (row == 0 && j % ahead == 0) {
          pack<kTileColumns<S>>(g.b + p * g.b_row_stride + j * g.b_column_stride, g.b_column_stride, g.b_row_stride,
                                std::min(ahead, g.n - j), k, panel_b);
        }
        const int columns = static_cast<int>(std::min(kColumns, g.n - j));
        for (int64_t i = 0; i < rows; i += kTileRows) {
          S* tile = c + (row + i) * c_stride + j;
          const auto kernel = micro_kernel_for<S>(static_cast<int>(std::min<int64_t>(kTileRows, rows - i)));
          kernel(k, panels_a + i * k, panel_b, p == 0 ? bias + j : tile, p == 0 ? 0 : c_stride, tile, c_stride,
                 columns);
        }
      }
    }
    p += k;
  } while (p < g.k);

  if constexpr (!kInPlace) {
    for (int64_t i = 0; i < g.m; ++i) store_row(g.c + i * g.c_row_stride, c + i * c_stride, g.n);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
