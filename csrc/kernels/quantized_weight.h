// quantized_weight: the weights of linear layers in 8, 4 or 2 bits, in the layout that the kernels of quantized_linear
// read.
//
// Outputs are cut into tiles of 64, a tile is one run of bytes, and the tiles of all experts follow one another:
//
//     int8    64 scales (fp32), then for every 4 inputs: 64 outputs x 4 codes;         w = scale * (code - 128)
//     int4    64 powers of two p (e8m0), then for every 256 inputs a super-block: 64 factors d and 64 factors e (fp16),
//             3 x 64 words of 32 bits, and for every 8 of its inputs: 64 outputs x 4 bytes; byte b holds the code of
//             input b in its lower half, of input b + 4 above;    w = 2^(p - 127) * d * s * code - 2^(p - 127) * e * m
//     mxfp4   for every 32 inputs: 64 scales (e8m0), then codes (e2m1) as those of int4;  w = 2^(scale - 127) * value
//     fp8     for every 128 inputs: 64 scales (fp32), then for every input 64 codes (e4m3);  w = scale * value
//     affine8 for every 32 inputs: 64 scales, 64 offsets (fp32), then for every input 64 codes;
//                                                                                  w = fma(scale, code, offset)
//     affine4 for every 128 inputs: 64 scales, 64 offsets (fp32), then for every 2 inputs 64 bytes: the code of the
//             first in the lower half, that of the second in the upper half;       w = fma(scale, code, offset)
//     affine2 for every 16 inputs: 64 scales, 64 offsets (fp32), then for every 4 inputs 64 bytes: the codes from the
//             lowest bits on;                                                      w = fma(scale, code, offset)
//     symmetric8  for every 16 inputs: 64 scales (fp32), then for every input 64 codes (int8);  w = scale * code
//
// The three words of an output are 96 bits, from the lowest bit of the first word on: 8 scales s and then 8 minima m of
// 6 bits, one for each group of 32 inputs of the super-block. They are zero for groups that the last super-block lacks;
// it has no codes for these groups, either.
//
// Inputs are padded to a multiple of 32 and outputs to a multiple of 64. Padding stands for zero, except for
// inputs in int4 and in the affine formats: their code is 0, which stands for the minimum, or the offset, of the group.
// Kernels multiply them by zeros.
//
// quantize_weight rounds (E, N, H) weights of any dtype and strides, but not to the affine and symmetric formats, by
// the steps of pymoe/reference/quantized_weight.py: the same bytes on every processor and for any number of threads. It
// throws std::invalid_argument for a weight that is NaN, infinite or larger than 2^100; the output is then unspecified.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace pymoe {

inline constexpr int64_t kQuantizedTile = 64;   // outputs
inline constexpr int64_t kQuantizedGroup = 32;  // number of inputs that share a scale in int4 and mxfp4
inline constexpr int64_t kFp8Block = 128;       // fp8: inputs that share a scale; quantize_weight: outputs, too
inline constexpr int64_t kSuperGroups = 8;      // int4: number of groups of a super-block

// The numbers are those of pymoe/_common/types.py: the bits of a code, plus 10 for floating-point codes, 20 for the
// affine formats, or 30 for the symmetric format.
enum class WeightFormat : int64_t {
  kInt8 = 8,
  kInt4 = 4,
  kMxfp4 = 14,
  kFp8 = 18,
  kAffine8 = 28,
  kAffine4 = 24,
  kAffine2 = 22,
  kSymmetric8 = 38
};

constexpr int64_t bits_of(WeightFormat format) { return static_cast<int64_t>(format) % 10; }

constexpr int64_t quantized_groups(int64_t inputs) { return (inputs + kQuantizedGroup - 1) / kQuantizedGroup; }
constexpr int64_t fp8_blocks(int64_t inputs) { return (inputs + kFp8Block - 1) / kFp8Block; }
constexpr bool is_affine(WeightFormat format) {
  return format == WeightFormat::kAffine8 || format == WeightFormat::kAffine4 || format == WeightFormat::kAffine2;
}
// Returns whether the products of a format use fused multiply-adds in fp32. A tile of such a format consists of runs of
// inputs; each run begins with its scales and, in the affine formats, its offsets.
constexpr bool is_fused(WeightFormat format) {
  return format == WeightFormat::kFp8 || format == WeightFormat::kSymmetric8 || is_affine(format);
}
constexpr int64_t quantized_tiles(int64_t outputs) { return (outputs + kQuantizedTile - 1) / kQuantizedTile; }

// Returns the number of bytes of scales that precede the codes of each group of inputs: only mxfp4 has such scales.
constexpr int64_t quantized_ends_bytes(WeightFormat format) {
  return format == WeightFormat::kMxfp4 ? kQuantizedTile : 0;
}
// Returns the number of bytes of a group of inputs in a tile, without those that a tile (int8, int4), a super-block
// (int4) or a run (is_fused) has only once.
constexpr int64_t quantized_group_bytes(WeightFormat format) {
  return quantized_ends_bytes(format) + kQuantizedTile * kQuantizedGroup * bits_of(format) / 8;
}
constexpr int64_t quantized_head_bytes(WeightFormat format) {
  return kQuantizedTile * (format == WeightFormat::kInt8 ? 4 : format == WeightFormat::kInt4 ? 1 : 0);
}
// Returns the number of bytes that precede the codes of an int4 super-block in a tile; 0 for other formats.
constexpr int64_t quantized_super_bytes(WeightFormat format) {
  return format == WeightFormat::kInt4 ? kQuantizedTile * (2 + 2 + 12) : 0;
}
// For formats of is_fused: fused_run is the number of inputs of a run, fused_head_bytes the number of bytes before its
// codes, fused_run_bytes the number of all its bytes, and fused_begin the offset in a tile of the run that contains
// `input`.
constexpr int64_t fused_run(WeightFormat format) {
  return format == WeightFormat::kSymmetric8 || format == WeightFormat::kAffine2 ? kQuantizedGroup / 2
         : format == WeightFormat::kAffine8                                      ? kQuantizedGroup
                                                                                 : kFp8Block;
}
constexpr int64_t fused_head_bytes(WeightFormat format) { return kQuantizedTile * (is_affine(format) ? 8 : 4); }
constexpr int64_t fused_run_bytes(WeightFormat format) {
  return fused_head_bytes(format) + fused_run(format) * quantized_group_bytes(format) / kQuantizedGroup;
}
constexpr int64_t fused_begin(WeightFormat format, int64_t input) {
  return input / fused_run(format) * fused_run_bytes(format);
}
constexpr int64_t quantized_tile_bytes(WeightFormat format, int64_t inputs) {
  const int64_t groups = quantized_groups(inputs), supers = (groups + kSuperGroups - 1) / kSuperGroups;
  const int64_t bytes =
      quantized_head_bytes(format) + supers * quantized_super_bytes(format) + groups * quantized_group_bytes(format);
  const int64_t padded = groups * kQuantizedGroup;
  const int64_t runs = is_fused(format) ? (padded + fused_run(format) - 1) / fused_run(format) : 0;
  return bytes + runs * fused_head_bytes(format);
}

struct QuantizeWeightArguments {
  const void* weight;  // (E, N, H)
  int64_t strides[3];  // in elements
  uint8_t* packed;     // (E, tiles of N, bytes of a tile), contiguous
  int64_t experts;     // E
  int64_t outputs;     // N
  int64_t inputs;      // H
  WeightFormat format;
  DType dtype;  // of the weight
};

namespace cpu {
void quantize_weight(const QuantizeWeightArguments& arguments);
}  // namespace cpu

}  // namespace pymoe
