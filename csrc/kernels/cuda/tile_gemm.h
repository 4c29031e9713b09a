// A block's part of a matrix product on the CUDA cores: c = a * b^T for 64 rows of a and 128 rows of b, which are the
// columns of c, of fp32 or fp64 in full precision. (tensor_tile.h has 16-bit floats.) Sums run over the depth in order,
// for any position of the tile in c.
//
// If its packs are whole, a step of 64 bytes of depth is read into registers while the step before it is multiplied;
// there are two tiles of each operand in shared memory, so one barrier per step is enough. A thread holds 32 values of
// c in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile_loader.h"

namespace pymoe::cuda {

inline constexpr int kTileRows = 64, kTileColumns = 128;

// Calls compute(a_tile, b_tile) for every step of the depth. `a_shared` has room for two tiles of `a_size` elements,
// `b_shared` for two of `b_size`.
template <typename T, typename A, typename B, typename Compute>
PYMOE_DEVICE void for_each_step(A& a, B& b, int64_t depth, T* a_shared, int a_size, TileLayout a_layout, T* b_shared,
                                int b_size, TileLayout b_layout, Compute&& compute) {
  if (depth <= 0) return;
  int buffer = 1;
  for (int64_t left = depth + A::kDepth; left > 0; left -= A::kDepth, buffer ^= 1) {
    const bool first = left > depth;  // nothing to multiply yet
    T* const a_tile = a_shared + buffer * a_size;
    T* const b_tile = b_shared + buffer * b_size;
    if (!first) {
      a.store(a_tile, a_layout, left);  // its last readers have passed the barrier of the step before
      b.store(b_tile, b_layout, left);
      __syncthreads();
    }
    if (left > A::kDepth) {
      a.fetch(left - A::kDepth);
      b.fetch(left - A::kDepth);
    }
    if (!first) compute(a_tile, b_tile);
  }
}

PYMOE_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
PYMOE_DEVICE double fused_multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Computes a tile with 8 warps. A warp has 16 rows x 64 columns, and a thread has 4 rows x (4 + 4) columns of it.
template <typename T>
struct CudaCoreTile {
  static constexpr int kThreads = 256, kBlocks = 1;
  static constexpr int kRun = 16 / static_cast<int>(sizeof(T));

  template <int kRows, typename Places = InSequence>
  using Loader = TileLoader<T, kRows, kThreads, Places>;
  static constexpr int kDepth = Loader<kTileRows>::kDepth;
  // A tile is stored depth by depth, so that a thread reads neighbouring rows in packs.
  static constexpr int kAPitch = kTileRows + kRun, kBPitch = kTileColumns + kRun;
  static constexpr int kASize = kDepth * kAPitch, kBSize = kDepth * kBPitch;
  static constexpr int kSharedPacks = 2 * (kASize + kBSize) / Loader<kTileRows>::kPack;  // packs of 16 bytes, aligned

  T sum[4][8] = {};
  int thread_row, thread_column;

  PYMOE_DEVICE CudaCoreTile() {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    thread_row = warp / 2 * 16 + lane / 8 * 4;
    thread_column = warp % 2 * 64 + lane % 8 * 4;
  }

  static PYMOE_DEVICE void load(T (&to)[4], const T* from) {
#pragma unroll
    for (int i = 0; i < 4; i += kRun) {
      const auto pack = load_pack<Pack<T, kRun>>(from + i);
#pragma unroll
      for (int j = 0; j < kRun; ++j) to[i + j] = pack[j];
    }
  }

  template <typename APlaces, typename BPlaces>
  PYMOE_DEVICE void run(const Operand<T, APlaces>& a, const Operand<T, BPlaces>& b, int rows, int columns,
                        int64_t depth, T* shared) {
    Loader<kTileRows, APlaces> a_loader(a, rows);
    Loader<kTileColumns, BPlaces> b_loader(b, columns);
    const bool idle = thread_row >= rows || thread_column >= columns;
    for_each_step(a_loader, b_loader, depth, shared, kASize, {1, kAPitch}, shared + 2 * kASize, kBSize, {1, kBPitch},
                  [&](const T* a_tile, const T* b_tile) {
                    if (idle) return;
#pragma unroll
                    for (int k = 0; k < kDepth; ++k) {
                      T a_values[4], b_values[2][4];
                      load(a_values, a_tile + k * kAPitch + thread_row);
                      load(b_values[0], b_tile + k * kBPitch + thread_column);
                      load(b_values[1], b_tile + k * kBPitch + thread_column + 32);
#pragma unroll
                      for (int i = 0; i < 4; ++i) {
#pragma unroll
                        for (int j = 0; j < 8; ++j) {
                          sum[i][j] = fused_multiply_add(a_values[i], b_values[j / 4][j % 4], sum[i][j]);
                        }
                      }
                    }
                  });
  }

  template <typename F>
  PYMOE_DEVICE void each(F&& f) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; j += kRun) f(thread_row + i, thread_column + j % 4 + j / 4 * 32, &sum[i][j]);
    }
  }
};

}  // namespace pymoe::cuda
