// Grouped products on the GPU, safe under CUDA graphs: nothing is read on the host. A launch of one block turns the
// offsets into a plan (kernels/cuda/group_plan.h); then every block takes one tile of the output and finds its expert
// in the plan. The grid is the largest number of tiles for any offsets, so blocks may find no tile and end. A tile runs
// over the whole depth of its sum, in the same steps for any size: results do not depend on the grid.
//
// 16-bit floats go through the tensor cores (kernels/cuda/tensor_tile.h) in tiles of 128 x 128; y in tiles of 64 x 128
// if experts have fewer than 128 rows on average. fp32 and fp64 go through the CUDA cores (kernels/cuda/tile_gemm.h).
//
// Tiles of 128 x 256 would read fewer bytes, but are not used. Compiled as an experiment, their 256 threads took 223 to
// 240 registers each, without a spill, so only one block fits a multiprocessor, and no other block multiplies while it
// finds its tile, waits for its first stage and writes its result. Little would be gained, too: on such a GPU, torch
// makes most products of bf16 (ops/torch_grouped_mm.h).
//
// Rows in a given order are read and written where the order says; a thread looks this up once per tile, or for every
// depth of a weight's gradient. Tiles are cut from the order, so tiles and sums are the same as for sorted rows.
//
// If torch's grouped GEMM makes the product, torch gets the plan's bounds as offsets, and the two complete_ kernels add
// what torch leaves out; they return immediately for tiles and experts that lack nothing.
#include <algorithm>
#include <limits>

#include "kernels/cuda/group_plan.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/tensor_tile.h"
#include "kernels/cuda/tile_gemm.h"
#include "kernels/grouped_linear.h"

namespace pymoe::cuda {
namespace {

constexpr const char* kName = "grouped_linear";

// Adds the bias to a tile's sums, rounds them and writes them to its part of the output, which begins at `to` and has
// rows of `pitch` elements. `places` gives the position of each row.
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
      __stcg(reinterpret_cast<Word*>(run), bit_cast<Word>(values));  // one access; a plain store would be split
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kRun; ++i) {
        if (column + i < columns) run[i] = values[i];
      }
    }
  });
}

// Clears the tile of y that begins at `to`; rows that an order omits are already clear.
template <typename T, int kThreads>
PYMOE_DEVICE void clear_tile(T* to, int64_t pitch, int rows, int columns) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * kTileColumns; i += kThreads) {
    if (i % kTileColumns < columns) to[i / kTileColumns * pitch + i % kTileColumns] = T{};
  }
}

// What the kernels need to store y: its memory, the bias and the sizes.
template <typename T>
struct Output {
  T* y;
  const T* bias;  // null: no bias
  int64_t bias_row_stride, bias_step;
  int64_t rows, features;
  int experts, column_tiles;
  bool in_runs;

  PYMOE_DEVICE int columns_of(const GroupTile& tile) const {
    const int64_t left = features - static_cast<int64_t>(tile.column) * kTileColumns;
    return left < kTileColumns ? static_cast<int>(left) : kTileColumns;
  }
  PYMOE_DEVICE const T* bias_of(const GroupTile& tile) const {
    if (bias == nullptr) return nullptr;
    return bias + tile.expert * bias_row_stride + static_cast<int64_t>(tile.column) * kTileColumns * bias_step;
  }
};

template <typename T, int kTileRows, bool kWeightAlongRows>
__global__ void __launch_bounds__(kTensorThreads, kTensorBlocks<kTileRows>)
    tensor_linear_kernel(TensorOperand<T> x, TensorOperand<T> weight, int64_t weight_stride, GroupPlan plan,
                         Output<T> out, int64_t input_features) {
  using Tile = TensorTile<T, kTileRows, false, kWeightAlongRows>;
  PYMOE_SHARED(uint4, shared, Tile::kSharedPacks);
  const GroupTile tile = find_tile(plan, out.experts, out.rows, kTileRows, blockIdx.x, out.column_tiles);
  if (tile.rows == 0) return;
  const int64_t column = static_cast<int64_t>(tile.column) * kTensorColumns;
  const int columns = out.columns_of(tile);
  const bool by_order = x.order != nullptr;
  T* const to = out.y + (by_order ? 0 : tile.first) * out.features + column;
  if (tile.expert == out.experts) {  // rows of no expert
    if (!by_order) clear_tile<T, kTensorThreads>(to, out.features, tile.rows, columns);
    return;
  }
  x.begin_at(tile.first);
  weight.data += tile.expert * weight_stride + column * (kWeightAlongRows ? weight.element_stride : weight.line_stride);
  Tile sums;
  sums.run(x, weight, tile.rows, columns, input_features, reinterpret_cast<T*>(shared));
  const auto places = [&](int row) -> int64_t {
    if (!by_order) return row;
    const int64_t place = x.order[row];
    return place < x.count ? place : -1;
  };
  sums.write(to, out.features, tile.rows, columns, out.in_runs, places, out.bias_of(tile), out.bias_step);
}

template <typename T, typename Places>
__global__ void __launch_bounds__(CudaCoreTile<T>::kThreads)
    linear_kernel(Operand<T, Places> x, Operand<T> weight, int64_t weight_stride, GroupPlan plan, Output<T> out,
                  int64_t input_features) {
  using Tile = CudaCoreTile<T>;
  PYMOE_SHARED(uint4, shared, Tile::kSharedPacks);
  const GroupTile tile = find_tile(plan, out.experts, out.rows, kTileRows, blockIdx.x, out.column_tiles);
  if (tile.rows == 0) return;
  const int64_t column = static_cast<int64_t>(tile.column) * kTileColumns;
  const int columns = out.columns_of(tile);
  T* const to = out.y + x.places.moves(tile.first) * out.features + column;
  if (tile.expert == out.experts) {  // rows of no expert
    if (!Places::kGiven) clear_tile<T, Tile::kThreads>(to, out.features, tile.rows, columns);
    return;
  }
  x.begin_at(tile.first, x.row_stride);
  weight.data += tile.expert * weight_stride + column * weight.row_stride;
  Tile sums;
  sums.run(x, weight, tile.rows, columns, input_features, reinterpret_cast<T*>(shared));
  write_tile(sums, to, out.features, x.places, tile.rows, columns, out.bias_of(tile), out.bias_step, out.in_runs);
}

constexpr int kClearThreads = 256;

// Clears all of y if some rows have no expert; used with an order. The rows of experts are written afterwards.
template <typename T>
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(T* y, GroupPlan plan, int experts, int64_t rows, int64_t output_features) {
  if (plan.bounds[experts] == rows) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kClearThreads, count = rows * output_features;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x; i < count; i += stride) y[i] = T{};
}

// A tile of a weight's gradient: its rows are features of grad, its columns features of x, its depth the expert's rows.
struct WeightTile {
  int64_t expert, row, column, begin, depth, place;  // place: position of the tile's first element in the gradient
  int rows, columns;

  PYMOE_DEVICE WeightTile(const GroupPlan& plan, int64_t input_features, int64_t output_features, int tile_rows,
                          int64_t row_tiles, int64_t column_tiles) {
    const int64_t block = blockIdx.x;
    expert = block / (row_tiles * column_tiles);
    row = block / column_tiles % row_tiles * tile_rows;
    column = block % column_tiles * kTileColumns;
    begin = plan.bounds[expert];
    depth = plan.bounds[expert + 1] - begin;
    place = (expert * output_features + row) * input_features + column;
    rows = static_cast<int>(min(output_features - row, int64_t{tile_rows}));
    columns = static_cast<int>(min(input_features - column, int64_t{kTileColumns}));
  }
};

template <typename T>
__global__ void __launch_bounds__(kTensorThreads, kTensorBlocks<128>)
    tensor_weight_grad_kernel(TensorOperand<T> grad, TensorOperand<T> x, GroupPlan plan, T* PYMOE_RESTRICT weight_grad,
                              int64_t input_features, int64_t output_features, int64_t row_tiles, int64_t column_tiles,
                              bool in_runs) {
  using Tile = TensorTile<T, 128, true, true>;
  PYMOE_SHARED(uint4, shared, Tile::kSharedPacks);
  const WeightTile tile(plan, input_features, output_features, 128, row_tiles, column_tiles);
  grad.begin_at(tile.begin);
  x.begin_at(tile.begin);
  grad.data += tile.row * grad.element_stride;
  x.data += tile.column * x.element_stride;
  Tile sums;
  sums.run(grad, x, tile.rows, tile.columns, tile.depth, reinterpret_cast<T*>(shared));
  sums.write(weight_grad + tile.place, input_features, tile.rows, tile.columns, in_runs, InSequence{});
}

template <typename T, typename Places>
__global__ void __launch_bounds__(CudaCoreTile<T>::kThreads)
    weight_grad_kernel(Operand<T, Places> grad, Operand<T, Places> x, GroupPlan plan, T* PYMOE_RESTRICT weight_grad,
                       int64_t input_features, int64_t output_features, int64_t row_tiles, int64_t column_tiles,
                       bool in_runs) {
  using Tile = CudaCoreTile<T>;
  PYMOE_SHARED(uint4, shared, Tile::kSharedPacks);
  const WeightTile tile(plan, input_features, output_features, kTileRows, row_tiles, column_tiles);
  grad.begin_at(tile.begin, grad.depth_stride);
  x.begin_at(tile.begin, x.depth_stride);
  grad.data += tile.row * grad.row_stride;
  x.data += tile.column * x.row_stride;
  Tile sums;
  sums.run(grad, x, tile.rows, tile.columns, tile.depth, reinterpret_cast<T*>(shared));
  write_tile<T>(sums, weight_grad + tile.place, input_features, InSequence{}, tile.rows, tile.columns, nullptr, 0,
                in_runs);
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

// Clears the rows of y that have no expert; returns immediately if there are none.
__global__ void __launch_bounds__(kCompleteThreads)
    complete_linear_kernel(uint4* y, GroupPlan plan, int64_t packs, int64_t row_packs, int experts) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCompleteThreads;
  for (int64_t i = plan.bounds[experts] * row_packs + static_cast<int64_t>(blockIdx.x) * kCompleteThreads + threadIdx.x;
       i < packs; i += stride) {
    y[i] = uint4{};
  }
}

// Clears the gradients of experts without rows. Several blocks share an expert.
__global__ void __launch_bounds__(kCompleteThreads)
    complete_weight_grad_kernel(uint4* weight_grad, GroupPlan plan, int64_t expert_packs, int64_t blocks) {
  const int64_t expert = blockIdx.x / blocks;
  if (plan.bounds[expert] < plan.bounds[expert + 1]) return;
  for (int64_t i = blockIdx.x % blocks * kCompleteThreads + threadIdx.x; i < expert_packs;
       i += blocks * kCompleteThreads) {
    weight_grad[expert * expert_packs + i] = uint4{};
  }
}

// Returns true if threads may store each of their runs of columns with one 16-byte access.
template <typename T>
bool in_runs(const void* output, int64_t features) {
  return widest_access({output}, features * static_cast<int64_t>(sizeof(T))) == 16;
}

// Returns the number of rows in a tile of y.
int tile_rows_of(const GroupedArguments& a) {
  return size_of(a.dtype) == 2 && a.rows >= 128 * a.experts ? 128 : kTileRows;
}

template <typename T, int kTileRows>
void tensor_linear(const GroupedLinearArguments& a, const Output<T>& out, int64_t blocks, void* stream) {
  const TensorOperand<T> x =
      tensor_operand<T>(a.x.data, a.x.row_stride, a.x.column_stride, 0, a.order, a.order != nullptr ? a.rows : 0);
  const auto run = [&](auto kernel, int64_t line_stride, int64_t element_stride) {
    launch(kName, kernel, {blocks, kTensorThreads}, stream, x,
           tensor_operand<T>(a.weight.data, line_stride, element_stride, a.weight_stride), a.weight_stride,
           group_plan(a.workspace, a.experts), out, a.input_features);
  };
  if (a.weight.row_stride == 1 && a.weight.column_stride != 1) {
    run(tensor_linear_kernel<T, kTileRows, true>, a.weight.column_stride, a.weight.row_stride);
  } else {
    run(tensor_linear_kernel<T, kTileRows, false>, a.weight.row_stride, a.weight.column_stride);
  }
}

template <typename T, typename Places>
void linear(const GroupedLinearArguments& a, const Places& places, void* stream) {
  const GroupPlan plan = group_plan(a.workspace, a.experts);
  if (Places::kGiven) {
    constexpr int64_t kMostBlocks = 1024, kShare = 8;  // kShare: elements per thread, more at kMostBlocks
    launch(kName, clear_kernel<T>,
           {std::min(ceil_div(a.rows * a.output_features, kShare * kClearThreads), kMostBlocks), kClearThreads}, stream,
           a.out, plan, a.experts, a.rows, a.output_features);
  }
  const int64_t column_tiles = ceil_div(a.output_features, kTileColumns);
  const int64_t blocks = most_row_tiles(a.rows, a.experts, tile_rows_of(a)) * column_tiles;
  const Output<T> out{static_cast<T*>(a.out),
                      static_cast<const T*>(a.bias.data),
                      a.bias.row_stride,
                      a.bias.column_stride,
                      a.rows,
                      a.output_features,
                      static_cast<int>(a.experts),
                      static_cast<int>(column_tiles),
                      in_runs<T>(a.out, a.output_features)};
  if constexpr (sizeof(T) == 2) {
    tile_rows_of(a) == 128 ? tensor_linear<T, 128>(a, out, blocks, stream)
                           : tensor_linear<T, 64>(a, out, blocks, stream);
  } else {
    launch(kName, linear_kernel<T, Places>, {blocks, CudaCoreTile<T>::kThreads}, stream,
           operand<T>(a.x.data, a.x.row_stride, a.x.column_stride, a.rows, a.input_features, Cut::kRows, 0, places),
           operand<T>(a.weight.data, a.weight.row_stride, a.weight.column_stride, a.output_features, a.input_features,
                      Cut::kNone, a.weight_stride),
           a.weight_stride, plan, out, a.input_features);
  }
}

template <typename T, typename Places>
void weight_grad(const GroupedWeightGradArguments& a, const Places& places, void* stream) {
  constexpr int kRows = sizeof(T) == 2 ? 128 : kTileRows;
  const GroupPlan plan = group_plan(a.workspace, a.experts);
  const int64_t row_tiles = ceil_div(a.output_features, kRows);
  const int64_t column_tiles = ceil_div(a.input_features, kTileColumns), blocks = a.experts * row_tiles * column_tiles;
  const bool runs = in_runs<T>(a.out, a.input_features);
  if constexpr (sizeof(T) == 2) {
    const auto by_rows = [&](const MatrixView& m) {
      return tensor_operand<T>(m.data, m.row_stride, m.column_stride, 0, a.order, a.order != nullptr ? a.rows : 0);
    };
    launch(kName, tensor_weight_grad_kernel<T>, {blocks, kTensorThreads}, stream, by_rows(a.grad), by_rows(a.x), plan,
           a.out, a.input_features, a.output_features, row_tiles, column_tiles, runs);
  } else {
    launch(kName, weight_grad_kernel<T, Places>, {blocks, CudaCoreTile<T>::kThreads}, stream,
           operand<T>(a.grad.data, a.grad.column_stride, a.grad.row_stride, a.output_features, a.rows, Cut::kDepth, 0,
                      places),
           operand<T>(a.x.data, a.x.column_stride, a.x.row_stride, a.input_features, a.rows, Cut::kDepth, 0, places),
           plan, a.out, a.input_features, a.output_features, row_tiles, column_tiles, runs);
  }
}

template <typename T, typename Places>
void bias_grad(const GroupedBiasGradArguments& a, const Places& places, void* stream) {
  const int64_t strips = ceil_div(a.output_features, kWarp);
  launch(kName, bias_grad_kernel<T, Places>, {a.experts * strips, kBiasThreads}, stream, a.grad.data, a.grad.row_stride,
         a.grad.column_stride, places, group_plan(a.workspace, a.experts), a.out, a.output_features, strips);
}

// Calls f(TypeTag of the dtype, positions of the rows as InSequence or ByOrder).
template <typename F>
void for_kind(const GroupedArguments& a, F&& f) {
  visit_dtype(a.dtype,
              [&](auto type) { a.order == nullptr ? f(type, InSequence{}) : f(type, ByOrder{a.order, a.rows}); });
}

}  // namespace

int compute_capability(int device) {
#if defined(__CUDACC__)
  int major = 0, minor = 0;
  check(kName, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check(kName, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
#else
  static_cast<void>(device);
  return emulator::compute_capability();
#endif
}

void plan_grouped_linear(const GroupedArguments& a, void* stream) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  launch(kName, plan_groups_kernel, {1, kPlanThreads}, stream, a.offsets, group_plan(a.workspace, a.experts), a.experts,
         a.rows < kMostRows ? a.rows : kMostRows, tile_rows_of(a));
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
  constexpr int64_t kMostBlocks = 1024, kShare = 8;  // kShare: packs per thread, more at kMostBlocks
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
