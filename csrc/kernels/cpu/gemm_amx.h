// The gemm of bf16 with AMX tiles (see gemm.h and amx_tiles.h; no include guard on purpose).
//
// For each block of k, some rows of A are packed into tiles, which stay in the second-level cache. Then B is read a few
// columns at a time, and these are multiplied by all packed rows. B is the left factor of the instruction if it is
// contiguous along k, and its tiles are then usually read in place; otherwise it is the right factor. In both cases no
// transposition of B in memory is needed. With B as the left factor, the tiles of sums are those of C's transpose, and
// are transposed when they are rounded.
//
// The sum for an element of C takes 32 steps of k (one tile) at a time, in ascending order, as in amx_tiles.h; then the
// bias is added. The result does not depend on the number of rows, the layout or the blocks: between blocks of k, sums
// are kept in fp32.
//
// `Tiles` is AmxTiles, or its replacement in the tests (tests/cpp/emulated_tiles.h).
// clang-format off: each depends on those before it
#include "kernels/cpu/gemm_amx_pack.h"
#include "kernels/cpu/gemm_amx_store.h"
#include "kernels/cpu/gemm_amx_few.h"
// clang-format on

namespace pymoe::cpu::PYMOE_ISA {

// The first store of a block's sums waits for all earlier products, which takes as long as 20 products. So blocks of k
// are long, unless B is packed for few rows: then memory is the bottleneck.
inline constexpr int64_t kAmxDepth = 2048, kAmxMostDepth = 8192, kAmxShallow = 128;
inline constexpr int64_t kAmxRows = 256;                // smallest intended number of rows of A packed together
inline constexpr int64_t kAmxFewRows = 2 * kTileItems;  // for up to this many rows, packing B to align it does not pay
inline constexpr int64_t kAmxPanelBytes = 1 << 20;      // intended size of packed A: half of a second-level cache
inline constexpr int64_t kAmxChunkBytes = 256 << 10;    // intended size of a packed chunk of B
inline constexpr int64_t kAmxStepsBefore = 8;           // steps of a block after which the previous block is rounded

// Pointers to up to four adjacent tiles, each at its first step of k.
struct TileStrip {
  const BFloat16* tile[4];
  int64_t row_bytes;
  int64_t step;  // distance in elements from a tile to the next one along k

  PYMOE_INLINE TileStrip from(int64_t steps) const {
    TileStrip moved = *this;
    for (auto& begin : moved.tile) begin += steps * step;
    return moved;
  }
};

template <typename Tiles>
using TileKernel = void (*)(Tiles& tiles, int64_t steps, const TileStrip& left, const TileStrip& right,
                            RowsAhead& ahead);

// Adds the products along `steps` tiles of k to kLeft x kRight tiles of sums, which are tiles 0 to 3 in row-major
// order.
template <int kLeft, int kRight, typename Tiles>
void multiply_tiles(Tiles& tiles, int64_t steps, const TileStrip& left, const TileStrip& right, RowsAhead& ahead) {
  const BFloat16* l[4] = {left.tile[0], left.tile[1], left.tile[2], left.tile[3]};
  const BFloat16* r[4] = {right.tile[0], right.tile[1], right.tile[2], right.tile[3]};
  const auto add_product = [&]<int kProduct>(std::integral_constant<int, kProduct>) __attribute__((always_inline)) {
    constexpr int kRow = kProduct / kRight, kColumn = kProduct % kRight;
    if constexpr (kColumn == 0) tiles.template load<4 + kRow % 2>(l[kRow], left.row_bytes);
    if constexpr (kRow == 0) tiles.template load<6 + kColumn % 2>(r[kColumn], right.row_bytes);
    tiles.template multiply<kProduct, 4 + kRow % 2, 6 + kColumn % 2>();
    if constexpr (kColumn == kRight - 1) l[kRow] += left.step;
    if constexpr (kRow == kLeft - 1) r[kColumn] += right.step;
  };
  [&]<int... i>(std::integer_sequence<int, i...>) {
    for (int64_t step = 0; step < steps; ++step) {
      ahead.ask();
      (add_product(std::integral_constant<int, i>{}), ...);
    }
  }(std::make_integer_sequence<int, kLeft * kRight>{});
}

template <typename Tiles>
TileKernel<Tiles> tile_kernel_for(int64_t left, int64_t right) {
  static constexpr TileKernel<Tiles> one_left[] = {&multiply_tiles<1, 1, Tiles>, &multiply_tiles<1, 2, Tiles>,
                                                   &multiply_tiles<1, 3, Tiles>, &multiply_tiles<1, 4, Tiles>};
  static constexpr TileKernel<Tiles> two_left[] = {&multiply_tiles<2, 1, Tiles>, &multiply_tiles<2, 2, Tiles>};
  if (left == 1) return one_left[right - 1];
  if (left == 2) return two_left[right - 1];
  return left == 3 ? &multiply_tiles<3, 1, Tiles> : &multiply_tiles<4, 1, Tiles>;
}

// Calls f.template operator()<i>() for i < count <= 4.
template <typename F>
PYMOE_INLINE void for_tiles(int64_t count, const F& f) {
  if (count > 0) f.template operator()<0>();
  if (count > 1) f.template operator()<1>();
  if (count > 2) f.template operator()<2>();
  if (count > 3) f.template operator()<3>();
}

// The sums of a block of C. The 256 sums of its tile (ta, tb) begin at sums + (ta * stride + tb) * 256.
struct TileSums {
  int64_t row;
  int64_t column;
  int64_t tiles_a;
  int64_t tiles_b;
  float* sums;
  int64_t stride;

  PYMOE_INLINE float* at(int64_t ta, int64_t tb) const { return sums + (ta * stride + tb) * kTileSums; }
};

// Adds the bias to a block of sums, rounds them and writes them to C.
template <bool kLeftB>
void finish_tiles(const Gemm<BFloat16>& g, const TileSums& block, const float* bias) {
  for (int64_t ta = 0; ta < block.tiles_a; ++ta) {
    const int64_t row = block.row + ta * kTileItems, rows = std::min(kTileItems, g.m - row);
    for (int64_t tb = 0; tb < block.tiles_b; tb += 2) {
      const int64_t column = block.column + tb * kTileItems,
                    columns = std::min(std::min<int64_t>(2, block.tiles_b - tb) * kTileItems, g.n - column);
      TileRow rounded[16];
      round_sums<kLeftB>(block.at(ta, tb), block.at(ta, std::min(tb + 1, block.tiles_b - 1)), bias + column, rounded);
      for (int64_t r = 0; r < rows; ++r) {
        BFloat16* to = g.c + place_of(g.rows, row + r) * g.c_row_stride + column;
        g.leaves_cache ? store_tile_row<true>(to, rounded[r], columns) : store_tile_row<false>(to, rounded[r], columns);
      }
    }
  }
}

// Computes the rows from `begin` to `end` of C.
template <bool kLeftB, typename Tiles>
void gemm_amx_rows(const Gemm<BFloat16>& g, int64_t begin, int64_t end) {
  const int64_t m = end - begin;
  const TileSource a{g.a, g.a_row_stride, g.a_column_stride, g.rows, g.steps};
  const TileSource b{g.b, g.b_column_stride, g.b_row_stride, nullptr, g.steps};
  const auto tiles_of = [](int64_t items) { return (items + kTileItems - 1) / kTileItems; };
  // Numbers of tiles of A and of B that are multiplied together. If A has only one tile and B is the left factor, a
  // single tile of B is used, because memory is faster if fewer lines of B are read at a time.
  const int64_t side_a = m <= kTileItems ? 1 : 2, side_b = kLeftB && side_a == 1 ? 1 : 4 / side_a;
  const int64_t block_m = side_a * kTileItems, block_n = side_b * kTileItems;
  const int64_t groups_a = tiles_of(m), groups_b = tiles_of(g.n), padded_n = round_up(g.n, 2 * kTileItems);
  const int64_t fitting = kAmxPanelBytes / (groups_a * kTileBytes) * kTileDepth;
  const int64_t block_k = !kLeftB && m <= kAmxFewRows ? kAmxShallow : std::clamp(fitting, kAmxDepth, kAmxMostDepth);
  const int64_t most_k = std::min(block_k, g.k), most_depth = (most_k + kTileDepth - 1) / kTileDepth;
  // An unaligned row of a tile takes two loads, so an unaligned B is packed, except for few rows.
  const bool aligned = reinterpret_cast<uintptr_t>(g.b) % 64 == 0 && g.b_column_stride % kTileDepth == 0;
  const bool in_place = kLeftB && (aligned || m <= kAmxFewRows);
  // Number of columns of B that are read or packed at a time.
  const int64_t chunk =
      kLeftB ? block_n : std::clamp<int64_t>(kAmxChunkBytes / 2 / std::max<int64_t>(1, most_k) / 64 * 64, 64, 1024);
  const bool waits = g.k > block_k;  // true if unfinished sums must be kept until the next block of k

  constexpr auto kSize = static_cast<int64_t>(sizeof(float));
  const int64_t a_size = most_depth * groups_a * kTileBytes, b_size = most_depth * (chunk / kTileItems) * kTileBytes;
  const int64_t sums_size = (waits ? groups_a * groups_b : 2 * 4) * kTileSums * kSize;
  auto* memory = static_cast<float*>(gemm_buffer().reserve(a_size + b_size + padded_n * kSize + sums_size));
  auto* panels_a = reinterpret_cast<BFloat16*>(carve(memory, a_size / kSize));
  auto* panels_b = reinterpret_cast<BFloat16*>(carve(memory, b_size / kSize));
  float* bias = carve(memory, padded_n);
  float* sums = memory;
  widen_bias(g, padded_n, bias);

  Tiles tiles(kLeftB ? kTileItems : std::min(m, kTileItems));
  TileSums pending{};  // a finished block; it is rounded while the next one is multiplied
  const auto finish = [&] {
    finish_tiles<kLeftB>(g, pending, bias);
    pending = {};
  };
  int64_t p = 0;
  do {
    const int64_t k = std::min(block_k, g.k - p), depth = (k + kTileDepth - 1) / kTileDepth;
    RowsAhead ahead{};
    if (kLeftB && p == 0 && k > 0) {  // the first columns were not prefetched
      ahead = RowsAhead(b.at(0, p), k, g.b_column_stride, std::min(chunk, g.n), groups_a * depth);
    }
    pack_tiles<kLeftB>(a, begin, m, p, k, panels_a, ahead);
    for (int64_t j0 = 0; j0 < g.n; j0 += chunk) {
      const int64_t columns = std::min(chunk, g.n - j0);
      const bool reads_b = in_place && columns == chunk;
      // Prefetch the part of B that is used next: the next columns, or the first columns of the next block of k.
      const bool here = j0 + chunk < g.n;
      const int64_t column = here ? j0 + chunk : 0, q = here ? p : p + k;
      const int64_t next_k = here ? k : std::min(block_k, g.k - q), next_columns = std::min(chunk, g.n - column);
      const int64_t blocks = ((m + block_m - 1) / block_m) * ((columns + block_n - 1) / block_n);
      const int64_t pauses = depth * (blocks + (reads_b ? 0 : tiles_of(columns)));
      if (next_k > 0) {
        ahead = kLeftB ? RowsAhead(b.at(column, q), next_k, g.b_column_stride, next_columns, pauses)
                       : RowsAhead(b.at(column, q), next_columns, g.b_row_stride, next_k, pauses);
      }
      const int64_t whole = reads_b ? k / kTileDepth : depth;  // if B is read in place, an incomplete step is packed
      if (whole < depth || !reads_b) {
        const int64_t packed = reads_b ? whole * kTileDepth : 0;
        pack_tiles<!kLeftB>(b, j0, columns, p + packed, k - packed, panels_b, ahead);
      }
      for (int64_t j = j0; j < j0 + columns; j += block_n) {
        const int64_t tiles_b = std::min(side_b, tiles_of(j0 + columns - j));
        TileStrip strip_b{{}, 64, kTileElements}, last_b{{}, 64, kTileElements};
        for (int64_t t = 0; t < 4; ++t) {
          const int64_t tile = std::min(t, tiles_b - 1), group = (j - j0) / kTileItems + tile;
          strip_b.tile[t] = reads_b ? b.at(j + tile * kTileItems, p) : panels_b + group * depth * kTileElements;
          last_b.tile[t] = panels_b + group * kTileElements;
        }
        if (reads_b) {
          strip_b.row_bytes = 2 * g.b_column_stride;
          strip_b.step = kTileDepth;
        }
        for (int64_t i = 0; i < m; i += block_m) {
          const int64_t tiles_a = std::min(side_a, tiles_of(m - i)), rights = kLeftB ? tiles_a : tiles_b;
          TileStrip strip_a{{}, 64, kTileElements};
          for (int64_t t = 0; t < 4; ++t) {
            strip_a.tile[t] = panels_a + (i / kTileItems + std::min(t, tiles_a - 1)) * depth * kTileElements;
          }
          const auto kernel = tile_kernel_for<Tiles>(kLeftB ? tiles_b : tiles_a, rights);
          const auto multiply = [&](int64_t from, int64_t steps, const TileStrip& from_b) {
            const TileStrip from_a = strip_a.from(from);
            kLeftB ? kernel(tiles, steps, from_b, from_a, ahead) : kernel(tiles, steps, from_a, from_b, ahead);
          };
          float* const place = waits ? sums + (i / kTileItems * groups_b + j / kTileItems) * kTileSums
                                     : sums + (pending.sums == sums ? 4 : 0) * kTileSums;
          const TileSums block{begin + i, j, tiles_a, tiles_b, place, waits ? groups_b : side_b};
          const auto sum_of = [&](int t) {
            return kLeftB ? block.at(t % rights, t / rights) : block.at(t / rights, t % rights);
          };
          for_tiles(tiles_a * tiles_b, [&]<int t>() {
            if (p == 0) {
              tiles.template zero<t>();
            } else {
              tiles.template load<t>(sum_of(t), 64);
            }
          });
          const int64_t before = std::min(whole, kAmxStepsBefore);
          multiply(0, before, strip_b);
          finish();
          multiply(before, whole - before, strip_b.from(before));
          if (whole < depth) multiply(whole, 1, last_b);
          for_tiles(tiles_a * tiles_b, [&]<int t>() { tiles.template store<t>(sum_of(t), 64); });
          if (p + k == g.k) pending = block;
        }
      }
    }
    p += k;
  } while (p < g.k);
  finish();
  if (g.leaves_cache) stream_fence();
}

template <typename Tiles>
void gemm_amx(const Gemm<BFloat16>& g) {
  if (g.m == 0 || g.n == 0) return;
  const bool left_b = g.b_row_stride == 1 && g.steps == nullptr;
#if PYMOE_ISA_LEVEL == 4
  if (!left_b && g.m <= kAmxMostVectorRows && g.b_column_stride == 1 && g.steps == nullptr) return gemm_amx_few(g);
#endif
  // Each pass over B multiplies about as many rows of A as the packed panels of A have room for, or twice as many if
  // each pass must pack B. Passes have nearly equal sizes, so that none has only a few rows. (Over more than a few
  // passes, rounding up to a multiple of kAmxFewRows can still leave few rows for the last one.)
  const int64_t fitting = kAmxPanelBytes / 2 / std::clamp<int64_t>(g.k, 1, kAmxDepth);
  const int64_t wanted = std::max(kAmxRows, fitting) * (left_b ? 1 : 2);
  const int64_t passes = std::max<int64_t>(1, (g.m + wanted / 2) / wanted);
  const int64_t rows = round_up((g.m + passes - 1) / passes, kAmxFewRows);
  const auto multiply = left_b ? &gemm_amx_rows<true, Tiles> : &gemm_amx_rows<false, Tiles>;
  for (int64_t row = 0; row < g.m; row += rows) multiply(g, row, std::min(g.m, row + rows));
}

}  // namespace pymoe::cpu::PYMOE_ISA
