#include "kernels/quantized_linear.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/checked_offsets.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/parallel.h"
#include "kernels/quantized_weight.h"

#define PYMOE_ISA_BODY "kernels/quantized_linear_cpu_body.h"
#define PYMOE_ISA_BF16
#define PYMOE_ISA_DOTPROD
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {
namespace {

// The smallest number of an expert's rows for which tiles are faster than vectors.
constexpr int64_t kFewestTileRows = 5;

// The functions that round rows and multiply them by a tile of weights, for one kind of instruction.
template <typename T>
struct Way {
  void (*round_block)(const T*, int64_t, int8_t*, RoundedBlock&);
  void (*multiply_tile)(const uint8_t*, int64_t, const RoundedRows&, const T*, T*, int64_t, int64_t);
  int64_t row_bytes;    // of a block's integers
  int64_t panel_bytes;  // most bytes of rounded rows in a task of over 96 rows; they are read for each tile
};

// Calls f with subnormal numbers enabled, even if the thread is set to flush them to zero.
template <typename F>
void with_subnormals(const F& f) {
#if PYMOE_MULTIVERSION
  constexpr unsigned kFlush = 0x8040;  // of results (FTZ) and operands (DAZ)
  const unsigned before = _mm_getcsr();
  if ((before & kFlush) != 0) _mm_setcsr(before & ~kFlush);
  f();
  if ((before & kFlush) != 0) _mm_setcsr(before);
#elif PYMOE_NEON
  constexpr uint64_t kFlush = (1u << 24) | 1u;  // of results and operands (FZ), or of operands (FIZ)
  uint64_t before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  if ((before & kFlush) != 0) asm volatile("msr fpcr, %0" ::"r"(before & ~kFlush));
  f();
  if ((before & kFlush) != 0) asm volatile("msr fpcr, %0" ::"r"(before));
#else
  f();
#endif
}

template <WeightFormat kFormat, typename T>
void multiply_with_subnormals(const uint8_t* tile, int64_t inputs, const RoundedRows& x, const T* bias, T* out,
                              int64_t row_stride, int64_t count) {
  const auto multiply = PYMOE_SELECT_ISA_UP_TO_BF16(multiply_tile_fused<kFormat, T>);
  with_subnormals([&] { multiply(tile, inputs, x, bias, out, row_stride, count); });
}

template <typename T, WeightFormat kFormat>
class Ways {
 public:
  const Way<T>& of(int64_t rows) const { return rows < kFewestTileRows ? few_ : many_; }
  // Returns the number of bytes that are reserved for a block of a row: enough for few and for many rows.
  int64_t row_bytes() const { return std::max(few_.row_bytes, many_.row_bytes); }

 private:
  Way<T> few_ = by_vectors();
  Way<T> many_ = by_tiles();

  static Way<T> by_vectors() {
    if constexpr (is_fused(kFormat)) {
      return {PYMOE_SELECT_ISA_UP_TO_BF16(widen_block<T>), &multiply_with_subnormals<kFormat, T>, kWidenedBytes,
              int64_t{3} << 19};
    } else {
      return {PYMOE_SELECT_ISA_OF_BYTES(round_block<Integers::kForVectors, T>),
              PYMOE_SELECT_ISA_OF_BYTES(multiply_tile<kFormat, T>), kRoundedBytes, int64_t{3} << 19};
    }
  }

  Way<T> by_tiles() const {
#if PYMOE_MULTIVERSION
    if constexpr (!is_fused(kFormat)) {  // AMX has no fp32, nor sums in the order of the inputs
      constexpr Integers kIntegers = integers_for_tiles(kFormat);
      if (best_isa() >= Isa::kAmx) {
        return {&v4_bf16::round_block<kIntegers, T>, &v4_bf16::multiply_tile_by_tiles<kFormat, T, AmxTiles>,
                rounded_bytes(kIntegers), int64_t{1} << 20};
      }
    }
#endif
    return few_;
  }
};

// A task: some tiles of an expert's outputs, for some of the expert's rows.
struct Task {
  int64_t expert;
  int64_t row;
  int64_t rows;
  int64_t tile;
  int64_t tiles;
};

// Cuts the work into tasks. A task reads up to 256 KiB of weights, less for more than four rows, but at least one tile.
// The cut does not affect the results.
template <typename T, WeightFormat kFormat>
std::vector<Task> cut(const QuantizedLinearArguments& a, const Ways<T, kFormat>& ways) {
  constexpr int64_t kBytes = int64_t{256} << 10, kFewestTogether = 96;
  const int64_t tiles = quantized_tiles(a.outputs);
  const int64_t bytes = std::max<int64_t>(1, quantized_tile_bytes(a.format, a.inputs));
  std::vector<Task> tasks;
  for (int64_t expert = 0; expert < a.experts; ++expert) {
    const int64_t end = a.offsets[expert + 1], rows = end - a.offsets[expert];
    if (rows == 0) continue;
    const Way<T>& way = ways.of(rows);
    const int64_t fitting = way.panel_bytes / (way.row_bytes * std::max<int64_t>(1, rounded_blocks(a.inputs)));
    const int64_t most = std::max(kFewestTogether, fitting), parts = (rows + most - 1) / most;
    const int64_t together = std::max<int64_t>(1, kBytes / bytes * 4 / std::max<int64_t>(4, rows));
    for (int64_t part = 0, row = a.offsets[expert], size; part < parts; ++part, row += size) {
      size = (end - row) / (parts - part);
      for (int64_t tile = 0; tile < tiles; tile += together) {
        tasks.push_back({expert, row, size, tile, std::min(together, tiles - tile)});
      }
    }
  }
  return tasks;
}

// Clears the rows of the result that have no expert; a row has `columns` columns.
template <typename Arguments>
void clear_unused(const Arguments& a, int64_t columns) {
  const int64_t used = a.offsets[a.experts], row_bytes = columns * size_of(a.dtype);
  const int64_t bytes = (a.rows - used) * row_bytes;
  if (bytes > 0) std::memset(static_cast<char*>(a.out) + used * row_bytes, 0, static_cast<size_t>(bytes));
}

template <typename T, WeightFormat kFormat>
void multiply(const QuantizedLinearArguments& a) {
  const Ways<T, kFormat> ways;
  const int64_t used = a.offsets[a.experts], blocks = rounded_blocks(a.inputs), row_bytes = ways.row_bytes();
  auto* codes = static_cast<int8_t*>(a.workspace);  // (blocks, used rows, row_bytes)
  auto* rounded = reinterpret_cast<RoundedBlock*>(codes + blocks * used * row_bytes);
  // Returns the address of the first block of a row's rounded integers. An expert's rows begin at row_bytes times the
  // number of earlier experts' rows; the distance between rows depends on the expert's kind of product.
  const auto codes_of = [&](int64_t expert, int64_t row) {
    const int64_t begin = a.offsets[expert], its_bytes = ways.of(a.offsets[expert + 1] - begin).row_bytes;
    return codes + begin * row_bytes + (row - begin) * its_bytes;
  };
  parallel_for(0, used, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, a.inputs)), [&](int64_t begin, int64_t end) {
    int64_t expert = std::upper_bound(a.offsets, a.offsets + a.experts, begin) - a.offsets - 1;
    for (int64_t row = begin; row < end; ++row) {
      while (row >= a.offsets[expert + 1]) ++expert;
      const auto round_block = ways.of(a.offsets[expert + 1] - a.offsets[expert]).round_block;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kRoundedInputs;
        round_block(static_cast<const T*>(a.x) + row * a.inputs + first, std::min(kRoundedInputs, a.inputs - first),
                    codes_of(expert, row) + block * used * row_bytes, rounded[block * used + row]);
      }
    }
  });
  const auto tasks = cut(a, ways);
  const int64_t tiles = quantized_tiles(a.outputs), bytes = quantized_tile_bytes(a.format, a.inputs);
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    const Task& task = tasks[static_cast<size_t>(index)];
    const Way<T>& way = ways.of(a.offsets[task.expert + 1] - a.offsets[task.expert]);
    const RoundedRows x{codes_of(task.expert, task.row), used * row_bytes, rounded + task.row, used, task.rows};
    for (int64_t tile = task.tile; tile < task.tile + task.tiles; ++tile) {
      const int64_t output = tile * kQuantizedTile;
      const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + task.expert * a.outputs + output;
      way.multiply_tile(a.packed + (task.expert * tiles + tile) * bytes, a.inputs, x, bias,
                        static_cast<T*>(a.out) + task.row * a.outputs + output, a.outputs,
                        std::min(kQuantizedTile, a.outputs - output));
    }
  });
  clear_unused(a, a.outputs);
}

// Returns the number of inputs of an expert that are decoded at a time: a multiple of 32, and if possible so small that
// there are several tasks per thread. The number does not affect the results.
int64_t inputs_together(int64_t inputs, int64_t input_bytes, int64_t experts) {
  const auto slices = [&](int64_t width) { return (inputs + width - 1) / width; };
  int64_t width = std::max<int64_t>(1, kDecodedBytes / std::max<int64_t>(1, input_bytes * kQuantizedGroup));
  width = std::min(width, quantized_groups(inputs)) * kQuantizedGroup;
  const int threads = num_threads();
  while (threads > 1 && experts * slices(width) < 6 * threads && width > kQuantizedGroup) {
    width = round_up(width / 2, kQuantizedGroup);
  }
  return round_up((inputs + slices(width) - 1) / slices(width), kQuantizedGroup);  // slices of equal size
}

template <typename T, WeightFormat kFormat>
void input_grad(const QuantizedInputGradArguments& a) {
  const auto decode = PYMOE_SELECT_ISA_UP_TO_BF16(decode_inputs<kFormat, T>);
  const auto gemm = chosen_gemm<T>();
  const int64_t tiles = quantized_tiles(a.outputs), bytes = quantized_tile_bytes(a.format, a.inputs);
  std::vector<int64_t> busy;  // experts with rows
  for (int64_t e = 0; e < a.experts; ++e) {
    if (a.offsets[e] < a.offsets[e + 1] && a.inputs > 0) busy.push_back(e);
  }
  // The stride of long rows must not be a power of two, which would map all of them to the same few sets of the caches.
  const int64_t stride = a.outputs < kQuantizedTile ? a.outputs : round_up(a.outputs, 64) + 32;
  const auto input_bytes = stride * static_cast<int64_t>(sizeof(T)), experts = static_cast<int64_t>(busy.size());
  const int64_t width = experts == 0 ? 1 : inputs_together(a.inputs, input_bytes, experts);
  const int64_t slices = (a.inputs + width - 1) / width;
  parallel_tasks(experts * slices, [&](int64_t task) {
    const int64_t expert = busy[static_cast<size_t>(task / slices)], first = task % slices * width;
    const int64_t count = std::min(width, a.inputs - first), row = a.offsets[expert];
    thread_local ThreadBuffer buffer;
    auto* weights = static_cast<T*>(buffer.reserve(std::max<int64_t>(1, count * input_bytes)));  // (count, stride)
    with_subnormals([&] {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t output = tile * kQuantizedTile;
        decode(a.packed + (expert * tiles + tile) * bytes, first, first + count,
               std::min(kQuantizedTile, a.outputs - output), weights + output, stride);
      }
    });
    gemm({
        .a = static_cast<const T*>(a.grad) + row * a.outputs,
        .a_row_stride = a.outputs,
        .a_column_stride = 1,
        .b = weights,
        .b_row_stride = 1,
        .b_column_stride = stride,
        .bias = nullptr,
        .bias_stride = 0,
        .c = static_cast<T*>(a.out) + row * a.inputs + first,
        .c_row_stride = a.inputs,
        .m = a.offsets[expert + 1] - row,
        .n = count,
        .k = a.outputs,
    });
  });
  clear_unused(a, a.inputs);
}

// Calls run.template operator()<T, format>() for the dtype and the format of the arguments.
template <typename Arguments, typename Run>
void select(const Arguments& arguments, const Run& run) {
  const auto with = [&]<typename T>(TypeTag<T>) {
    switch (arguments.format) {
      case WeightFormat::kInt8: return run.template operator()<T, WeightFormat::kInt8>();
      case WeightFormat::kInt4: return run.template operator()<T, WeightFormat::kInt4>();
      case WeightFormat::kMxfp4: return run.template operator()<T, WeightFormat::kMxfp4>();
      case WeightFormat::kFp8: return run.template operator()<T, WeightFormat::kFp8>();
      case WeightFormat::kAffine8: return run.template operator()<T, WeightFormat::kAffine8>();
      case WeightFormat::kAffine4: return run.template operator()<T, WeightFormat::kAffine4>();
      case WeightFormat::kAffine2: return run.template operator()<T, WeightFormat::kAffine2>();
      case WeightFormat::kSymmetric8: return run.template operator()<T, WeightFormat::kSymmetric8>();
    }
  };
  switch (arguments.dtype) {
    case DType::kBFloat16: return with(TypeTag<BFloat16>{});
    case DType::kFloat16: return with(TypeTag<Float16>{});
    default: return with(TypeTag<float>{});
  }
}

}  // namespace

void quantized_linear(const QuantizedLinearArguments& arguments) {
  check_offsets("quantized_linear", arguments.offsets, arguments.experts, arguments.rows);
  select(arguments, [&]<typename T, WeightFormat kFormat>() { multiply<T, kFormat>(arguments); });
}

void quantized_linear_input_grad(const QuantizedInputGradArguments& arguments) {
  check_offsets("quantized_linear", arguments.offsets, arguments.experts, arguments.rows);
  select(arguments, [&]<typename T, WeightFormat kFormat>() { input_grad<T, kFormat>(arguments); });
}

}  // namespace pymoe::cpu
