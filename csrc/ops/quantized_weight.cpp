// pymoe::quantize_weight: see kernels/quantized_weight.h for what it computes and pymoe/reference/quantized_weight.py
// for its contract. The weight may have any strides.
#include <torch/csrc/stable/library.h>

#include "kernels/quantized_weight.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/twins.h"

namespace pymoe::ops::quantized_weight_op {
namespace {

constexpr const char* kName = "quantize_weight";

Tensor quantize_weight(const Tensor& weight, int64_t number) {
  const DType dtype = floating_dtype(kName, "weight", weight);
  require(weight.dim() == 3, kName, "weight must have shape (E, N, H), got ", weight);
  require(number == 8 || number == 4 || number == 14 || number == 18, kName, "format must be 8, 4, 14 or 18, got ",
          number);
  const auto format = static_cast<WeightFormat>(number);
  const int64_t experts = weight.size(0), outputs = weight.size(1), inputs = weight.size(2);
  Tensor packed =
      empty({experts, quantized_tiles(outputs), quantized_tile_bytes(format, inputs)}, ScalarType::Byte, weight);
  cpu::quantize_weight({weight.const_data_ptr(),
                        {weight.strides()[0], weight.strides()[1], weight.strides()[2]},
                        static_cast<uint8_t*>(packed.mutable_data_ptr()),
                        experts,
                        outputs,
                        inputs,
                        format,
                        dtype});
  return packed;
}

PYMOE_OPERATOR_OF_THE_CPU("quantize_weight", quantize_weight, "(Tensor weight, int format) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::quantized_weight_op
