// Assigns a grouped product's rows to blocks, on the device.
//
// A plan consists of two arrays of E + 1 numbers. `bounds` are the offsets, made safe for memory: the first is 0, none
// is less than the one before or more than S. Offsets that keep the contract stay unchanged. For any others, no row
// outside of [0, S) is touched, and no two experts share a row. tiles[e] is the number of tiles of rows before expert
// e. The rows past the last bound have separate tiles, as if they were those of an expert E.
#pragma once

#include <cstdint>

#include "kernels/cuda/lane_group.h"
#include "kernels/cuda/launch.h"

namespace pymoe::cuda {

struct GroupPlan {
  int32_t* bounds;  // (E + 1,)
  int32_t* tiles;   // (E + 1,)
};

inline GroupPlan group_plan(int32_t* workspace, int64_t experts) { return {workspace, workspace + experts + 1}; }

// Returns an upper limit for the number of tiles of `rows` rows, for any offsets.
inline int64_t most_row_tiles(int64_t rows, int64_t experts, int64_t tile_rows) {
  return rows / tile_rows + experts + 1;
}

inline constexpr int kPlanThreads = 256;

// Returns the inclusive scan over the threads of the block: the combination of the values of all threads up to the
// calling one. The block has kPlanThreads threads. `scratch` has room for one value per warp.
template <typename F>
PYMOE_DEVICE int scan_block(int value, int* scratch, const F& combine) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  value = scan_lanes<kWarp>(value, lane, combine);
  if (lane == kWarp - 1) scratch[warp] = value;
  __syncthreads();
  for (int i = 0; i < warp; ++i) value = combine(scratch[i], value);
  __syncthreads();
  return value;
}

// Computes the plan; launch it with one block. `rows`: S, or the greatest int32 if S is greater.
static __global__ void __launch_bounds__(kPlanThreads)
    plan_groups_kernel(const int32_t* PYMOE_RESTRICT offsets, GroupPlan plan, int experts, int rows, int tile_rows) {
  PYMOE_SHARED(int, scratch, kPlanThreads / kWarp);
  PYMOE_SHARED(int, ends, kPlanThreads);
  PYMOE_SHARED(int, carried, 2);  // bound and number of tiles before this round's experts
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    plan.bounds[0] = plan.tiles[0] = 0;
    carried[0] = carried[1] = 0;
  }
  __syncthreads();
  for (int first = 0; first < experts; first += kPlanThreads) {
    const int expert = first + thread, begin = carried[0], tiles_before = carried[1];
    int end = expert < experts ? offsets[expert + 1] : 0;
    end = end < begin ? begin : end > rows ? rows : end;
    end = scan_block(end, scratch, Greatest{});
    ends[thread] = end;
    __syncthreads();
    const int length = end - (thread == 0 ? begin : ends[thread - 1]);
    const int own_tiles = length == 0 ? 0 : (length - 1) / tile_rows + 1;
    const int tiles = tiles_before + scan_block(own_tiles, scratch, Sum{});
    if (expert < experts) {
      plan.bounds[expert + 1] = end;
      plan.tiles[expert + 1] = tiles;
    }
    if (thread == kPlanThreads - 1) {  // all threads have read `carried`, before the barriers above
      carried[0] = end;
      carried[1] = tiles;
    }
    __syncthreads();
  }
}

// A tile of rows of one expert or, if expert == E, of rows that have no expert. Past the last tile, `rows` is 0.
struct GroupTile {
  int expert;
  int rows;
  int64_t first;
  int column;  // index of the tile of columns
};

// The number of tiles of rows in a band. Consecutive blocks take the columns of an expert one after the other in the
// same kBand tiles of rows, so that concurrent blocks read few rows of x and few of the weight: 264 blocks of 128 x 128
// read 8 tiles of x and 33 of the weight, instead of up to 264 of the weight if they took row after row.
inline constexpr unsigned kBand = 8;

// Returns the tile of a block. The tile has no rows if the block is past the last tile. All lanes of a warp call the
// function together, with the same block.
PYMOE_DEVICE GroupTile find_tile(const GroupPlan& plan, int experts, int64_t rows, int tile_rows, unsigned block,
                                 unsigned column_tiles) {
  const int tile = static_cast<int>(block / column_tiles);
  // Find the last e with tiles[e] <= tile. A warp compares 32 values per round: two rounds up to E = 1023.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int expert = 0, candidates = experts + 1;
  while (candidates > 1) {
    const int step = (candidates + kWarp - 1) / kWarp, ahead = lane * step;
    const bool reached = ahead < candidates && plan.tiles[expert + ahead] <= tile;
    const int last = __popc(__ballot_sync(kFullWarp, reached)) - 1;
    expert += last * step;
    candidates = candidates - last * step < step ? candidates - last * step : step;
  }
  const int64_t begin = plan.bounds[expert], end = expert < experts ? int64_t{plan.bounds[expert + 1]} : rows;
  // The block's number among the expert's blocks, which are ordered in bands; the last band may have fewer rows.
  const unsigned own = static_cast<unsigned>(ceil_div(end - begin, tile_rows)), band_blocks = kBand * column_tiles;
  const unsigned in_expert = block - static_cast<unsigned>(plan.tiles[expert]) * column_tiles;
  const unsigned band = in_expert / band_blocks * kBand, in_band = in_expert % band_blocks;
  const unsigned height = band < own && own - band < kBand ? own - band : kBand;
  const unsigned column = in_band / height;
  const int64_t first = begin + static_cast<int64_t>(band + in_band % height) * tile_rows;
  const int64_t left = column < column_tiles ? end - first : 0;
  return {expert,
          static_cast<int>(left < 0           ? 0
                           : left < tile_rows ? left
                                              : tile_rows),
          first, static_cast<int>(column)};
}

}  // namespace pymoe::cuda
