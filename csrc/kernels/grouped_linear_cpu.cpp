#include "kernels/grouped_linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/checked_offsets.h"
#include "kernels/cpu/checked_order.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/parallel.h"

#define PYMOE_ISA_BODY "kernels/cpu/gemm_body.h"
#define PYMOE_ISA_BF16
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {

template <typename T>
auto chosen_gemm() -> void (*)(const Gemm<T>&) {
#if PYMOE_MULTIVERSION
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (best_isa() >= Isa::kAmx) return &v4_bf16::gemm_amx<AmxTiles>;
  }
#endif
  return PYMOE_SELECT_ISA_UP_TO_BF16(gemm<T>);
}
template auto chosen_gemm<float>() -> void (*)(const Gemm<float>&);
template auto chosen_gemm<BFloat16>() -> void (*)(const Gemm<BFloat16>&);
template auto chosen_gemm<Float16>() -> void (*)(const Gemm<Float16>&);

namespace {

template <typename T>
const T* element(const MatrixView& view, int64_t row, int64_t column) {
  return static_cast<const T*>(view.data) + row * view.row_stride + column * view.column_stride;
}

void fill_zero(void* begin, int64_t bytes) {
  auto* data = static_cast<char*>(begin);
  parallel_for(0, bytes, int64_t{256} << 10,
               [&](int64_t from, int64_t to) { memset(data + from, 0, static_cast<size_t>(to - from)); });
}

// A block of an expert's output: the work of one task.
struct Block {
  int64_t expert;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
};

// Results of at least this many bytes are evicted from the caches before they are read again.
constexpr int64_t kLeavesCache = int64_t{64} << 20;

int64_t pieces(int64_t length, int64_t piece) { return (length + piece - 1) / piece; }

// Cuts the (rows_of(e), columns) outputs of all experts into blocks of gemm's preferred size, or into smaller ones if
// there would be too few blocks for the threads. The cut does not affect the results.
template <typename RowsOf>
std::vector<Block> cut(int64_t experts, const RowsOf& rows_of, int64_t columns) {
  // Multiples of every micro-kernel's tile except AVX-512's 14 rows, so that blocks end in whole tiles.
  constexpr int64_t kRowMultiple = 48, kColumnMultiple = 96, kSmallest = 96;
  int64_t block_rows = kGemmBlockRows, block_columns = kGemmBlockColumns;
  const int threads = num_threads();
  const auto count = [&] {
    int64_t blocks = 0;
    for (int64_t e = 0; e < experts; ++e) blocks += pieces(rows_of(e), block_rows) * pieces(columns, block_columns);
    return blocks;
  };
  while (threads > 1 && count() < 6 * threads && std::max(block_rows, block_columns) > kSmallest) {
    (block_rows > block_columns ? block_rows : block_columns) /= 2;
  }
  std::vector<Block> blocks;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = rows_of(e);
    if (rows == 0 || columns == 0) continue;
    const auto even = [](int64_t length, int64_t piece, int64_t multiple) {
      return pieces(pieces(length, pieces(length, piece)), multiple) * multiple;
    };
    const int64_t step = even(rows, block_rows, kRowMultiple), width = even(columns, block_columns, kColumnMultiple);
    for (int64_t column = 0; column < columns; column += width) {
      for (int64_t row = 0; row < rows; row += step) {
        blocks.push_back({e, row, std::min(step, rows - row), column, std::min(width, columns - column)});
      }
    }
  }
  return blocks;
}

// Clears the rows of y that have no expert: those from the last offset on or, with an order, those that the order does
// not name.
void clear_rows_of_none(const GroupedLinearArguments& a, const std::vector<char>& named) {
  const int64_t used = a.offsets[a.experts], row_bytes = a.output_features * size_of(a.dtype);
  auto* y = static_cast<char*>(a.out);
  if (a.order == nullptr) return fill_zero(y + used * row_bytes, (a.rows - used) * row_bytes);
  if (used == a.rows || row_bytes == 0) return;  // a tensor without elements may have no address
  for (int64_t row = 0; row < a.rows; ++row) {
    if (named[static_cast<size_t>(row)] == 0) memset(y + row * row_bytes, 0, static_cast<size_t>(row_bytes));
  }
}

template <typename T>
void forward(const GroupedLinearArguments& a) {
  const int32_t* offsets = a.offsets;
  const auto blocks =
      cut(a.experts, [&](int64_t e) { return int64_t{offsets[e + 1]} - offsets[e]; }, a.output_features);
  const auto gemm = chosen_gemm<T>();
  parallel_tasks(static_cast<int64_t>(blocks.size()), [&](int64_t task) {
    const Block& block = blocks[static_cast<size_t>(task)];
    const int64_t row = offsets[block.expert] + block.row, first = move_to(a.order, row, 1);
    const MatrixView weight{static_cast<const T*>(a.weight.data) + block.expert * a.weight_stride, a.weight.row_stride,
                            a.weight.column_stride};
    gemm({
        .a = element<T>(a.x, first, 0),
        .a_row_stride = a.x.row_stride,
        .a_column_stride = a.x.column_stride,
        .b = element<T>(weight, block.column, 0),
        .b_row_stride = weight.column_stride,
        .b_column_stride = weight.row_stride,
        .bias = a.bias.data == nullptr ? nullptr : element<T>(a.bias, block.expert, block.column),
        .bias_stride = a.bias.column_stride,
        .c = static_cast<T*>(a.out) + first * a.output_features + block.column,
        .c_row_stride = a.output_features,
        .m = block.rows,
        .n = block.columns,
        .k = a.input_features,
        .rows = order_from(a.order, row),
    });
  });
}

template <typename T>
void weight_grad(const GroupedWeightGradArguments& a) {
  const auto blocks = cut(a.experts, [&](int64_t) { return a.output_features; }, a.input_features);
  const auto gemm = chosen_gemm<T>();
  const bool leaves_cache = a.experts * a.output_features * a.input_features * size_of(a.dtype) >= kLeavesCache;
  parallel_tasks(static_cast<int64_t>(blocks.size()), [&](int64_t task) {
    const Block& block = blocks[static_cast<size_t>(task)];
    const int64_t row = a.offsets[block.expert], first = move_to(a.order, row, 1);
    gemm({
        .a = element<T>(a.grad, first, block.row),
        .a_row_stride = a.grad.column_stride,
        .a_column_stride = a.grad.row_stride,
        .b = element<T>(a.x, first, block.column),
        .b_row_stride = a.x.row_stride,
        .b_column_stride = a.x.column_stride,
        .bias = nullptr,
        .bias_stride = 0,
        .c = static_cast<T*>(a.out) + (block.expert * a.output_features + block.row) * a.input_features + block.column,
        .c_row_stride = a.input_features,
        .m = block.rows,
        .n = block.columns,
        .k = int64_t{a.offsets[block.expert + 1]} - row,
        .leaves_cache = leaves_cache,
        .steps = order_from(a.order, row),
    });
  });
}

template <typename T>
void bias_grad(const GroupedBiasGradArguments& a) {
  constexpr int64_t kWidth = 64;  // columns per task
  const int64_t strips = pieces(a.output_features, kWidth);
  parallel_for(0, a.experts * strips, std::max<int64_t>(1, 65536 * a.experts / std::max<int64_t>(1, a.rows * kWidth)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t expert = i / strips, first = i % strips * kWidth;
                   const int64_t columns = std::min(kWidth, a.output_features - first);
                   accumulate_t<T> sum[kWidth] = {};
                   for (int64_t row = a.offsets[expert]; row < a.offsets[expert + 1]; ++row) {
                     const T* from = element<T>(a.grad, place_of(a.order, row), first);
                     for (int64_t j = 0; j < columns; ++j) sum[j] += to_accumulate(from[j * a.grad.column_stride]);
                   }
                   T* to = static_cast<T*>(a.out) + expert * a.output_features + first;
                   for (int64_t j = 0; j < columns; ++j) to[j] = round_to<T>(sum[j]);
                 }
               });
}

// Throws unless offsets and order keep their contract. Returns a flag for each row that is set if the order names the
// row, or an empty vector if there is no order.
std::vector<char> check(const GroupedArguments& a) {
  check_offsets("grouped_linear", a.offsets, a.experts, a.rows);
  if (a.order == nullptr) return {};
  return check_order("grouped_linear", a.order, a.offsets[a.experts], a.rows);
}

}  // namespace

void grouped_linear(const GroupedLinearArguments& arguments) {
  const std::vector<char> named = check(arguments);
  visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { forward<T>(arguments); });
  clear_rows_of_none(arguments, named);
}

void grouped_linear_weight_grad(const GroupedWeightGradArguments& arguments) {
  check(arguments);
  visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { weight_grad<T>(arguments); });
}

void grouped_linear_bias_grad(const GroupedBiasGradArguments& arguments) {
  check(arguments);
  visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { bias_grad<T>(arguments); });
}

}  // namespace pymoe::cpu
