#include "kernels/quantized_weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/cpu/parallel.h"

#define PYMOE_ISA_BODY "kernels/quantized_weight_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {
namespace {

// Gathers weights in fp32: values[i * 64 + j] = weight[expert, output + j, input + i], and 0 for missing outputs.
// `inputs` is at most 256. Throws std::invalid_argument for a weight that is NaN, infinite or larger than 2^100.
template <typename T>
void gather(const QuantizeWeightArguments& a, int64_t expert, int64_t output, int64_t input, int64_t inputs,
            float* values) {
  constexpr float kLargest = 0x1p100f;
  const int64_t outputs = std::min(kQuantizedTile, a.outputs - output);
  const T* from = static_cast<const T*>(a.weight) + expert * a.strides[0] + output * a.strides[1];
  if (outputs < kQuantizedTile) std::memset(values, 0, sizeof(float) * static_cast<size_t>(kQuantizedTile * inputs));
  bool finite = true;
  for (int64_t j = 0; j < outputs; ++j) {
    const T* row = from + j * a.strides[1] + input * a.strides[2];
    for (int64_t i = 0; i < inputs; ++i) {
      const auto value = static_cast<float>(to_accumulate(row[i * a.strides[2]]));
      finite &= value <= kLargest && value >= -kLargest;
      values[i * kQuantizedTile + j] = value;
    }
  }
  if (finite) return;
  for (int64_t j = 0; j < outputs; ++j) {
    for (int64_t i = 0; i < inputs; ++i) {
      const float value = values[i * kQuantizedTile + j];
      if (value <= kLargest && value >= -kLargest) continue;
      throw std::invalid_argument(
          "quantize_weight: weight must be finite and at most 2**100 in magnitude, which it is not at [" +
          std::to_string(expert) + ", " + std::to_string(output + j) + ", " + std::to_string(input + i) + "]");
    }
  }
}

template <typename T>
void quantize(const QuantizeWeightArguments& a) {
  const int64_t tiles = quantized_tiles(a.outputs), bytes = quantized_tile_bytes(a.format, a.inputs);
  const auto quantize_super_4 = PYMOE_SELECT_ISA(quantize_super_4);
  const auto powers_from_largest = PYMOE_SELECT_ISA(powers_from_largest);
  const auto quantize_group_mxfp4 = PYMOE_SELECT_ISA(quantize_group_mxfp4);
  const auto quantize_group_8 = PYMOE_SELECT_ISA(quantize_group_8);
  const auto raise_to_largest = PYMOE_SELECT_ISA(raise_to_largest);
  const auto scale_from_largest = PYMOE_SELECT_ISA(scale_from_largest);
  parallel_tasks(a.experts * tiles, [&](int64_t task) {
    const int64_t expert = task / tiles, output = task % tiles * kQuantizedTile;
    uint8_t* const tile = a.packed + task * bytes;
    alignas(64) float values[kSuperGroups * kQuantizedGroup * kQuantizedTile];
    const auto for_groups = [&](int64_t groups, const auto& body) {
      uint8_t* part = tile + quantized_head_bytes(a.format);
      for (int64_t input = 0; input < a.inputs; input += groups * kQuantizedGroup) {
        const int64_t inputs = std::min(groups * kQuantizedGroup, a.inputs - input);
        gather<T>(a, expert, output, input, inputs, values);
        body(inputs, part);
        part += groups * quantized_group_bytes(a.format) + quantized_super_bytes(a.format);
      }
    };
    if (a.format == WeightFormat::kMxfp4) {
      for_groups(1, [&](int64_t inputs, uint8_t* group) { quantize_group_mxfp4(values, inputs, group); });
      return;
    }
    alignas(64) float largest[kQuantizedTile] = {};
    for_groups(1, [&](int64_t inputs, uint8_t*) { raise_to_largest(values, inputs, largest); });
    if (a.format == WeightFormat::kInt4) {
      powers_from_largest(largest, tile);
      for_groups(kSuperGroups, [&](int64_t inputs, uint8_t* part) { quantize_super_4(values, inputs, largest, part); });
      return;
    }
    scale_from_largest(largest);
    std::memcpy(tile, largest, sizeof(largest));
    for_groups(1, [&](int64_t inputs, uint8_t* group) { quantize_group_8(values, inputs, largest, group); });
  });
}

// Quantizes to fp8. The outputs of two tiles share a scale per block of inputs, so a task takes one such block of two
// tiles.
template <typename T>
void quantize_fp8(const QuantizeWeightArguments& a) {
  static_assert(kFp8Block == 2 * kQuantizedTile);
  const int64_t tiles = quantized_tiles(a.outputs), pairs = (tiles + 1) / 2,
                bytes = quantized_tile_bytes(a.format, a.inputs);
  const auto quantize_group = PYMOE_SELECT_ISA(quantize_group_fp8);
  const auto raise_to_largest = PYMOE_SELECT_ISA(raise_to_largest);
  const auto scale_of_block = PYMOE_SELECT_ISA(scale_of_block);
  parallel_tasks(a.experts * pairs * fp8_blocks(a.inputs), [&](int64_t task) {
    const int64_t block = task % fp8_blocks(a.inputs), pair = task / fp8_blocks(a.inputs);
    const int64_t expert = pair / pairs, first = pair % pairs * 2, end = std::min(first + 2, tiles);
    alignas(64) float values[kQuantizedGroup * kQuantizedTile];
    const auto for_groups = [&](int64_t tile, const auto& body) {
      const int64_t last = std::min(a.inputs, (block + 1) * kFp8Block);
      for (int64_t input = block * kFp8Block; input < last; input += kQuantizedGroup) {
        const int64_t inputs = std::min(kQuantizedGroup, last - input);
        gather<T>(a, expert, tile * kQuantizedTile, input, inputs, values);
        body(inputs, input - block * kFp8Block);
      }
    };
    alignas(64) float largest[kQuantizedTile] = {};
    for (int64_t tile = first; tile < end; ++tile) {
      for_groups(tile, [&](int64_t inputs, int64_t) { raise_to_largest(values, inputs, largest); });
    }
    const float scale = scale_of_block(largest);
    for (int64_t tile = first; tile < end; ++tile) {
      uint8_t* to = a.packed + (expert * tiles + tile) * bytes + fused_begin(a.format, block * kFp8Block);
      float scales[kQuantizedTile] = {};
      std::fill_n(scales, std::min(kQuantizedTile, a.outputs - tile * kQuantizedTile), scale);
      std::memcpy(to, scales, sizeof(scales));
      uint8_t* codes = to + sizeof(scales);
      for_groups(tile,
                 [&](int64_t inputs, int64_t i) { quantize_group(values, inputs, scale, codes + i * kQuantizedTile); });
    }
  });
}

}  // namespace

void quantize_weight(const QuantizeWeightArguments& arguments) {
  visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) {
    arguments.format == WeightFormat::kFp8 ? quantize_fp8<T>(arguments) : quantize<T>(arguments);
  });
}

}  // namespace pymoe::cpu
