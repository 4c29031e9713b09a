// quantized_linear: one linear layer per expert with quantised weights over rows that are sorted by expert, and the
// gradient of its input.
//
//     forward       y[r] = W[e] @ x[r] + bias[e]      for rows offsets[e] <= r < offsets[e + 1]; (S, H) -> (S, N)
//     input grad    dx[r] = W[e].T @ grad[r]          for these rows;                            (S, N) -> (S, H)
//
// W is packed as described in quantized_weight.h. Rows of x are rounded to integers of 16 bits in blocks of 128 inputs,
// whose step is a power of two. Products with the codes of the weights (in mxfp4 with twice their values) are added up
// as integers over a block (8 bits) or a group of 32 (4 bits), and these sums are scaled and added in fp32, without
// fused multiply-adds, in the order of the inputs: pymoe/reference/quantized_linear.py has the steps. Integer sums have
// no order, so the bits of a result depend only on its row and its expert: not on the instruction set, the threads or
// the rows around it. In fp8 and in the affine and symmetric formats nothing is rounded to integers: fp32 fused
// multiply-adds add up the products of a block of 128 inputs in their order, and the sums are scaled (fp8) and added as
// above.
//
// The input gradient takes the weights of dequantize_weight, rounded to the dtype of `grad`. Some inputs of one expert
// at a time are decoded as a matrix (inputs, N) of at most kDecodedBytes, or of 32 inputs if these take more, and
// multiplied by gemm (kernels/cpu/gemm.h): the bits are those of grouped_linear with all weights decoded as (E, H, N),
// and depend neither on the threads nor on the rows around a row.
//
// Rows past offsets[E] have no expert: their y or dx is zero, and their x or grad is never read. Every element of the
// output is written. `offsets` must start at 0, not decrease, and end within S: otherwise std::invalid_argument or
// std::out_of_range is thrown before any other memory is touched. All tensors are contiguous. CPU only.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/quantized_weight.h"

namespace pymoe {

struct QuantizedLinearArguments {
  const void* x;           // (S, H)
  const uint8_t* packed;   // (E, tiles of N, bytes of a tile)
  const int32_t* offsets;  // (E + 1,)
  const void* bias;        // (E, N); may be null
  void* out;               // y (S, N)
  int64_t rows;            // S
  int64_t inputs;          // H
  int64_t outputs;         // N
  int64_t experts;         // E
  WeightFormat format;     // of the packed weights
  DType dtype;             // dtype of x, bias and y: fp32, bf16 or fp16
  void* workspace;         // quantized_linear_workspace bytes of any content, 64-byte aligned for speed
};

struct QuantizedInputGradArguments {
  const void* grad;        // (S, N)
  const uint8_t* packed;   // (E, tiles of N, bytes of a tile)
  const int32_t* offsets;  // (E + 1,)
  void* out;               // dx (S, H)
  int64_t rows;            // S
  int64_t inputs;          // H
  int64_t outputs;         // N
  int64_t experts;         // E
  WeightFormat format;     // of the packed weights
  DType dtype;             // dtype of grad and dx: fp32, bf16 or fp16
};

inline constexpr int64_t kDecodedBytes = 1 << 20;  // of decoded weights, in a buffer that each thread keeps

// Describes a row's block of 128 inputs, rounded to integers: their step, and the sums of them that products need.
struct RoundedBlock {
  float step;     // NaN if the block has a NaN or an infinity; the integers are then zero
  int32_t zero;   // int8: 128 (the code of zero) times the sum of the integers
  float sums[4];  // 4 bits: the sums of the integers of each group of 32
};

inline constexpr int64_t kRoundedInputs = 128;
inline constexpr int64_t kRoundedBytes = 2 * kRoundedInputs;
inline constexpr int64_t kWidenedBytes = 4 * kRoundedInputs;  // is_fused: a block in fp32, in place of integers
static_assert(kFp8Block == kRoundedInputs);

// The layout of a block's rounded integers: for products of vectors, or of AMX tiles (quantized_linear_amx.h) with
// weights in 8 or 4 bits. For tiles with 4-bit weights, each integer is a pair of bf16.
enum class Integers { kForVectors, kForTiles8, kForTiles4 };

constexpr Integers integers_for_tiles(WeightFormat format) {
  return bits_of(format) == 8 ? Integers::kForTiles8 : Integers::kForTiles4;
}

constexpr int64_t rounded_bytes(Integers integers) {
  return integers == Integers::kForTiles4 ? 2 * kRoundedBytes : kRoundedBytes;
}

// Rounded rows of one expert: the first block of each row, then the second block of each row, and so on.
struct RoundedRows {
  const int8_t* codes;
  int64_t codes_stride;  // bytes from one block to the next
  const RoundedBlock* rounded;
  int64_t rounded_stride;
  int64_t count;
};

constexpr int64_t rounded_blocks(int64_t inputs) { return (inputs + kRoundedInputs - 1) / kRoundedInputs; }
constexpr int64_t quantized_linear_workspace(int64_t rows, int64_t inputs, WeightFormat format) {
  const int64_t codes = is_fused(format) ? kWidenedBytes : rounded_bytes(integers_for_tiles(format));
  return rows * rounded_blocks(inputs) * (codes + static_cast<int64_t>(sizeof(RoundedBlock)));
}

namespace cpu {
void quantized_linear(const QuantizedLinearArguments& arguments);
void quantized_linear_input_grad(const QuantizedInputGradArguments& arguments);
}  // namespace cpu

}  // namespace pymoe
