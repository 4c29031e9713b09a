#include "kernels/quantized_linear.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cpu/checked_offsets.h"
#include "kernels/cpu/parallel.h"
#include "kernels/quantized_weight.h"

#define PYMOE_ISA_BODY "kernels/quantized_linear_cpu_body.h"
#define PYMOE_ISA_BF16
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {
namespace {

// Some tiles of an expert's outputs for some of its rows: one task.
struct Task {
  int64_t expert;
  int64_t row;
  int64_t rows;
  int64_t tile;
  int64_t tiles;
};

// Cuts the work into tasks that read a quarter of a megabyte, or one tile for many rows. How it is cut does not show in
// the results.
std::vector<Task> cut(const QuantizedLinearArguments& a) {
  constexpr int64_t kBytes = int64_t{256} << 10, kRows = 384;
  const int64_t tiles = quantized_tiles(a.outputs);
  const int64_t bytes = std::max<int64_t>(1, quantized_tile_bytes(a.bits, a.inputs));
  std::vector<Task> tasks;
  for (int64_t expert = 0; expert < a.experts; ++expert) {
    const int64_t end = a.offsets[expert + 1];
    const int64_t rows = end - a.offsets[expert];
    if (rows == 0) continue;
    const int64_t together = std::max<int64_t>(1, kBytes / bytes * 4 / std::max<int64_t>(4, rows));
    for (int64_t tile = 0; tile < tiles; tile += together) {
      for (int64_t row = a.offsets[expert]; row < end; row += kRows) {
        tasks.push_back({expert, row, std::min(kRows, end - row), tile, std::min(together, tiles - tile)});
      }
    }
  }
  return tasks;
}

template <typename T, int kBits>
void multiply(const QuantizedLinearArguments& a) {
  const int64_t used = a.offsets[a.experts], blocks = rounded_blocks(a.inputs);
  auto* codes = static_cast<int8_t*>(a.workspace);  // (blocks, used rows, 256 bytes)
  auto* rounded = reinterpret_cast<RoundedBlock*>(codes + blocks * used * kRoundedBytes);
  const auto round_block = PYMOE_SELECT_ISA_UP_TO_BF16(round_block<T>);
  parallel_for(0, used, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, a.inputs)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kRoundedInputs;
        round_block(static_cast<const T*>(a.x) + row * a.inputs + first, std::min(kRoundedInputs, a.inputs - first),
                    codes + (block * used + row) * kRoundedBytes, rounded[block * used + row]);
      }
    }
  });
  const auto tasks = cut(a);
  const int64_t tiles = quantized_tiles(a.outputs), bytes = quantized_tile_bytes(a.bits, a.inputs);
  const auto multiply_tile = PYMOE_SELECT_ISA_UP_TO_BF16(multiply_tile<kBits, T>);
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    const Task& task = tasks[static_cast<size_t>(index)];
    for (int64_t tile = task.tile; tile < task.tile + task.tiles; ++tile) {
      const int64_t output = tile * kQuantizedTile;
      const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + task.expert * a.outputs + output;
      multiply_tile(a.packed + (task.expert * tiles + tile) * bytes, a.inputs, codes + task.row * kRoundedBytes,
                    rounded + task.row, task.rows, used, bias, static_cast<T*>(a.out) + task.row * a.outputs + output,
                    a.outputs, std::min(kQuantizedTile, a.outputs - output));
    }
  });
  const int64_t unused = (a.rows - used) * a.outputs;
  if (unused > 0) std::memset(static_cast<T*>(a.out) + used * a.outputs, 0, static_cast<size_t>(unused) * sizeof(T));
}

}  // namespace

void quantized_linear(const QuantizedLinearArguments& arguments) {
  check_offsets("quantized_linear", arguments.offsets, arguments.experts, arguments.rows);
  const auto run = [&]<typename T>(TypeTag<T>) {
    arguments.bits == 8 ? multiply<T, 8>(arguments) : multiply<T, 4>(arguments);
  };
  switch (arguments.dtype) {
    case DType::kBFloat16: return run(TypeTag<BFloat16>{});
    case DType::kFloat16: return run(TypeTag<Float16>{});
    default: return run(TypeTag<float>{});
  }
}

}  // namespace pymoe::cpu
