// Grouped products on the GPU, safe under CUDA graphs: nothing is read on the host. A launch of one block turns the
// offsets into a plan (kernels/cuda/group_plan.h); then every block takes one 64 x 128 tile of the output and finds its
// expert in the plan. The grid is the most tiles that any offsets could make, so blocks may find no tile and end. A
// tile runs over the whole depth of its sum: results know nothing of the grid. 64 rows, since experts see few rows.
//
// Per step of 32 depths a tile of 16-bit floats reads 12 KiB and multiplies 0.5 MFLOP: 43 FLOP a byte from L2. Blocks
// that follow each other take the columns of the same rows, whose x stays in L1 and L2. kernels/cuda/tile_gemm.h has
// the rest.
//
// Rows that an order gives are read and written at their places: of an operand, the loader looks up what its packs do
// not run along. The first row or depth of a tile is one of the order, so tiles and sums are those of sorted rows.
//
// Where torch's grouped GEMM makes the product, the plan's bounds are its offsets and the two complete_ kernels add
// what it leaves out; they return at once for tiles and experts that lack nothing.
#include <algorithm>
#include <limits>

#include "kernels/cuda/group_plan.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/tile_gemm.h"
#include "kernels/grouped_linear.h"

namespace pymoe::cuda {
namespace {

constexpr const char* kName = "grouped_linear";

// Writes a tile's part of the output: rows of `pitch` elements that begin at `to`, at their places. f(row, column)
// gives what to add.
template <typename T, typename Tile, typename Places>
PYMOE_DEVICE void write_tile(const Tile& tile, T* to, int64_t pitch, const Places& places, int rows, int columns,
                             const T* bias, int64_t bias_step, bool in_runs) {
  tile.each([&](int row, int column, const accumulate_t<T>* sums) {
    if (row >= rows) return;
    const int64_t place = places(row);
    if (Places::kGiven && place < 0) return;
    T* const run = to + place * pitch + column;
    Pack<T, Tile::kRun> values;
#pragma unroll
    for (int i = 0; i < Tile::kRun; ++i) {
      accumulate_t<T> value = sums[i];
      if (bias != nullptr && column + i < columns) value += to_accumulate(bias[(column + i) * bias_step]);
      values[i] = round_to<T>(value);
    }
    if (in_runs && column + Tile::kRun <= columns) {
      using Word = word_of<decltype(values)>;
      __stcg(reinterpret_cast<Word*>(run), bit_cast<Word>(values));  // one access; a plain one is taken apart
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kRun; ++i) {
        if (column + i < columns) run[i] = values[i];
      }
    }
  });
}

template <typename T, typename Places>
__global__ void __launch_bounds__(tile_for<T>::kThreads, tile_for<T>::kBlocks)
    linear_kernel(Operand<T, Places> x, Operand<T> weight, int64_t weight_stride, const T* PYMOE_RESTRICT bias,
                  int64_t bias_row_stride, int64_t bias_step, GroupPlan plan, T* PYMOE_RESTRICT y, int64_t rows,
                  int64_t input_features, int64_t output_features, int experts, int column_tiles, bool in_runs) {
  using Tile = tile_for<T>;
  PYMOE_SHARED(uint4, shared, Tile::kSharedPacks);
  const RowTile tile = find_row_tile(plan, experts, rows, kTileRows, static_cast<int>(blockIdx.x) / column_tiles);
  const int64_t column = static_cast<int64_t>(static_cast<int>(blockIdx.x) % column_tiles) * kTileColumns;
  const int64_t columns_left = output_features - column;
  const int columns = columns_left < kTileColumns ? static_cast<int>(columns_left) : kTileColumns;
  T* const to = y + x.places.moves(tile.first) * output_features + column;
  if (tile.expert == experts) {  // rows of no expert, or no rows; those that an order leaves out are clear
    const int count = Places::kGiven ? 0 : tile.rows * kTileColumns;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += Tile::kThreads) {
      if (i % kTileColumns < columns) to[i / kTileColumns * output_features + i % kTileColumns] = T{};
    }
    return;
  }
  x.begin_at(tile.first, x.row_stride);
  weight.data += tile.expert * weight_stride + column * weight.row_stride;
  if (bias != nullptr) bias += tile.expert * bias_row_stride + column * bias_step;
  Tile sums;
  sums.run(x, weight, tile.rows, columns, input_features, reinterpret_cast<T*>(shared));
  write_tile(sums, to, output_features, x.places, tile.rows, columns, bias, bias_step, in_runs);
}

constexpr int kClearThreads = 256;

// Clears y if it has rows of no expert, before the others are written at their places.
template <typename T>
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(T* y, GroupPlan plan, int experts, int64_t rows, int64_t output_features) {
  if (plan.bounds[experts] == rows) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kClearThreads, count = rows * output_features;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x; i < count; i += stride) y[i] = T{};
}

// The output's rows are grad's features, its columns x's, its depth the expert's rows.
template <typename T, typename Places>
__global__ void __launch_bounds__(tile_for<T>::kThreads, tile_for<T>::kBlocks)
    weight_grad_kernel(Operand<T, Places> grad, Operand<T, Places> x, GroupPlan plan, T* PYMOE_RESTRICT weight_grad,
                       int64_t input_features, int64_t output_features, int64_t row_tiles, int64_t column_tiles,
                       bool in_runs) {
  using Tile = tile_for<T>;
  PYMOE_SHARED(uint4, shared, Tile::kSharedPacks);
  const int64_t block = blockIdx.x, expert = block / (row_tiles * column_tiles);
  const int64_t row = block / column_tiles % row_tiles * kTileRows, column = block % column_tiles * kTileColumns;
  const int64_t rows_left = output_features - row, columns_left = input_features - column;
  const int rows = rows_left < kTileRows ? static_cast<int>(rows_left) : kTileRows;
  const int columns = columns_left < kTileColumns ? static_cast<int>(columns_left) : kTileColumns;
  const int64_t begin = plan.bounds[expert], end = plan.bounds[expert + 1];
  grad.begin_at(begin, grad.depth_stride);
  x.begin_at(begin, x.depth_stride);
  grad.data += row * grad.row_stride;
  x.data += column * x.row_stride;
  Tile sums;
  sums.run(grad, x, rows, columns, end - begin, reinterpret_cast<T*>(shared));
  write_tile<T>(sums, weight_grad + (expert * output_features + row) * input_features + column, input_features,
                InSequence{}, rows, columns, nullptr, 0, in_runs);
}

constexpr int kBiasThreads = 256, kBiasWarps = kBiasThreads / kWarp;

// A block sums one expert's rows in 32 columns. Warp w adds rows w, w + 8, w + 16, ... in turn; then the warps' sums
// are added in order.
template <typename T, typename Places>
__global__ void __launch_bounds__(kBiasThreads)
    bias_grad_kernel(const T* PYMOE_RESTRICT grad, int64_t row_stride, int64_t column_stride, Places places,
                     GroupPlan plan, T* PYMOE_RESTRICT bias_grad, int64_t output_features, int64_t strips) {
  using Sum = accumulate_t<T>;
  PYMOE_SHARED(Sum, sums, kBiasThreads);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int64_t expert = blockIdx.x / strips, column = blockIdx.x % strips * kWarp + lane;
  const int64_t end = plan.bounds[expert + 1];
  Sum sum = 0;
  if (column < output_features) {
    const T* from = grad + column * column_stride;
    const auto value_of = [&](int64_t row) {
      const int64_t place = places(row);
      return Places::kGiven && place < 0 ? T{} : from[place * row_stride];
    };
    constexpr int kAhead = 8;  // loads in flight
    int64_t row = int64_t{plan.bounds[expert]} + warp;
    for (; row + (kAhead - 1) * kBiasWarps < end; row += kAhead * kBiasWarps) {
      T values[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) values[i] = value_of(row + i * kBiasWarps);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) sum += to_accumulate(values[i]);
    }
    for (; row < end; row += kBiasWarps) sum += to_accumulate(value_of(row));
  }
  sums[thread] = sum;
  __syncthreads();
  if (warp == 0 && column < output_features) {
    for (int i = 1; i < kBiasWarps; ++i) sum += sums[i * kWarp + lane];
    bias_grad[expert * output_features + column] = round_to<T>(sum);
  }
}

constexpr int kCompleteThreads = 256;

// Clears the rows of no expert; nothing is left to do where there are none.
__global__ void __launch_bounds__(kCompleteThreads)
    complete_linear_kernel(uint4* y, GroupPlan plan, int64_t packs, int64_t row_packs, int experts) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCompleteThreads;
  for (int64_t i = plan.bounds[experts] * row_packs + static_cast<int64_t>(blockIdx.x) * kCompleteThreads + threadIdx.x;
       i < packs; i += stride) {
    y[i] = uint4{};
  }
}

// Clears the gradients of experts without rows. Several blocks an expert.
__global__ void __launch_bounds__(kCompleteThreads)
    complete_weight_grad_kernel(uint4* weight_grad, GroupPlan plan, int64_t expert_packs, int64_t blocks) {
  const int64_t expert = blockIdx.x / blocks;
  if (plan.bounds[expert] < plan.bounds[expert + 1]) return;
  for (int64_t i = blockIdx.x % blocks * kCompleteThreads + threadIdx.x; i < expert_packs;
       i += blocks * kCompleteThreads) {
    weight_grad[expert * expert_packs + i] = uint4{};
  }
}

// May threads store their runs of `features` columns as one access each?
template <typename T>
bool in_runs(const void* output, int64_t features) {
  constexpr int64_t kBytes = tile_for<T>::kRun * sizeof(T);
  return widest_access({output}, features * static_cast<int64_t>(sizeof(T))) >= kBytes;
}

template <typename T, typename Places>
void linear(const GroupedLinearArguments& a, const Places& places, void* stream) {
  if (Places::kGiven) {
    constexpr int64_t kMostBlocks = 1024, kShare = 8;  // elements a thread, before blocks take more
    launch(kName, clear_kernel<T>,
           {std::min(ceil_div(a.rows * a.output_features, kShare * kClearThreads), kMostBlocks), kClearThreads}, stream,
           a.out, group_plan(a.workspace, a.experts), a.experts, a.rows, a.output_features);
  }
  const int64_t column_tiles = ceil_div(a.output_features, kTileColumns);
  launch(kName, linear_kernel<T, Places>,
         {most_row_tiles(a.rows, a.experts, kTileRows) * column_tiles, tile_for<T>::kThreads}, stream,
         operand<T>(a.x.data, a.x.row_stride, a.x.column_stride, a.rows, a.input_features, Cut::kRows, 0, places),
         operand<T>(a.weight.data, a.weight.row_stride, a.weight.column_stride, a.output_features, a.input_features,
                    Cut::kNone, a.weight_stride),
         a.weight_stride, a.bias.data, a.bias.row_stride, a.bias.column_stride, group_plan(a.workspace, a.experts),
         a.out, a.rows, a.input_features, a.output_features, a.experts, column_tiles,
         in_runs<T>(a.out, a.output_features));
}

template <typename T, typename Places>
void weight_grad(const GroupedWeightGradArguments& a, const Places& places, void* stream) {
  const int64_t row_tiles = ceil_div(a.output_features, kTileRows);
  const int64_t column_tiles = ceil_div(a.input_features, kTileColumns);
  launch(kName, weight_grad_kernel<T, Places>, {a.experts * row_tiles * column_tiles, tile_for<T>::kThreads}, stream,
         operand<T>(a.grad.data, a.grad.column_stride, a.grad.row_stride, a.output_features, a.rows, Cut::kDepth, 0,
                    places),
         operand<T>(a.x.data, a.x.column_stride, a.x.row_stride, a.input_features, a.rows, Cut::kDepth, 0, places),
         group_plan(a.workspace, a.experts), a.out, a.input_features, a.output_features, row_tiles, column_tiles,
         in_runs<T>(a.out, a.input_features));
}

template <typename T, typename Places>
void bias_grad(const GroupedBiasGradArguments& a, const Places& places, void* stream) {
  const int64_t strips = ceil_div(a.output_features, kWarp);
  launch(kName, bias_grad_kernel<T, Places>, {a.experts * strips, kBiasThreads}, stream, a.grad.data, a.grad.row_stride,
         a.grad.column_stride, places, group_plan(a.workspace, a.experts), a.out, a.output_features, strips);
}

// f(TypeTag of the dtype, where the rows are).
template <typename F>
void for_kind(const GroupedArguments& a, F&& f) {
  visit_dtype(a.dtype,
              [&](auto type) { a.order == nullptr ? f(type, InSequence{}) : f(type, ByOrder{a.order, a.rows}); });
}

}  // namespace

int compute_capability(int device) {
  int major = 9;
#if defined(__CUDACC__)
  check(kName, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
#endif
  return major;
}

void plan_grouped_linear(const GroupedArguments& a, void* stream) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  launch(kName, plan_groups_kernel, {1, kPlanThreads}, stream, a.offsets, group_plan(a.workspace, a.experts), a.experts,
         a.rows < kMostRows ? a.rows : kMostRows, kTileRows);
}

void grouped_linear(const GroupedLinearArguments& a, void* stream) {
  if (a.rows == 0 || a.output_features == 0) return;
  plan_grouped_linear(a, stream);
  for_kind(a, [&]<typename T>(TypeTag<T>, const auto& places) { linear<T>(a, places, stream); });
}

void grouped_linear_weight_grad(const GroupedWeightGradArguments& a, void* stream) {
  if (a.experts == 0 || a.output_features == 0 || a.input_features == 0) return;
  plan_grouped_linear(a, stream);
  for_kind(a, [&]<typename T>(TypeTag<T>, const auto& places) { weight_grad<T>(a, places, stream); });
}

void grouped_linear_bias_grad(const GroupedBiasGradArguments& a, void* stream) {
  if (a.experts == 0 || a.output_features == 0) return;
  plan_grouped_linear(a, stream);
  for_kind(a, [&]<typename T>(TypeTag<T>, const auto& places) { bias_grad<T>(a, places, stream); });
}

void complete_grouped_linear(const GroupedLinearArguments& a, void* stream) {
  constexpr int64_t kMostBlocks = 1024, kShare = 8;  // packs a thread, before blocks take more
  const int64_t row_packs = a.output_features * size_of(a.dtype) / 16, packs = a.rows * row_packs;
  launch(kName, complete_linear_kernel,
         {std::min(ceil_div(packs, kShare * kCompleteThreads), kMostBlocks), kCompleteThreads}, stream, a.out,
         group_plan(a.workspace, a.experts), packs, row_packs, a.experts);
}

void complete_grouped_weight_grad(const GroupedWeightGradArguments& a, void* stream) {
  const int64_t packs = a.output_features * a.input_features * size_of(a.dtype) / 16;
  const int64_t blocks = ceil_div(packs, 16 * kCompleteThreads);
  launch(kName, complete_weight_grad_kernel, {a.experts * blocks, kCompleteThreads}, stream, a.out,
         group_plan(a.workspace, a.experts), packs, blocks);
}

}  // namespace pymoe::cuda
