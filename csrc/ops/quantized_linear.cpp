// pymoe::quantized_linear: see kernels/quantized_linear.h for what it computes and
// pymoe/reference/quantized_linear.py for its contract.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "kernels/quantized_linear.h"
#include "kernels/quantized_weight.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::quantized_linear_op {
namespace {

constexpr const char* kName = "quantized_linear";
constexpr int64_t kMostFeatures = int64_t{1} << 40;  // so that no count of bytes overflows

}  // namespace

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const Tensor& offsets, const std::optional<Tensor>& bias,
                        int64_t number, int64_t output_features, const Tensor* used) {
  const DType dtype = floating_dtype(kName, "x", x);
  require(dtype != DType::kFloat64, kName, "x must have dtype float32, bfloat16 or float16, got double");
  require_shape(kName, "x", x, {-1, -1});
  const WeightFormat format = weight_format(kName, number);
  require(output_features >= 0 && output_features <= kMostFeatures, kName,
          "output_features must be at least 0 and at most ", kMostFeatures, ", got ", output_features);
  const int64_t rows = x.size(0), inputs = x.size(1);
  require(inputs <= kMostFeatures, kName, "x must have at most ", kMostFeatures, " columns, got ", inputs);
  checked_offsets(kName, offsets, x);
  const int64_t experts = offsets.size(0) - 1;
  require_tensor(kName, "packed", packed, ScalarType::Byte,
                 {experts, quantized_tiles(output_features), quantized_tile_bytes(format, inputs)}, x);
  if (bias) require_tensor(kName, "bias", *bias, x.scalar_type(), {experts, output_features}, x);
  Tensor y = empty_in(used, rows, output_features, x);
  const Workspace workspace(quantized_linear_workspace(rows, inputs, format), ScalarType::Byte, x);
  cpu::quantized_linear({x.const_data_ptr(), static_cast<const uint8_t*>(packed.const_data_ptr()),
                         static_cast<const int32_t*>(offsets.const_data_ptr()), bias ? bias->const_data_ptr() : nullptr,
                         y.mutable_data_ptr(), rows, inputs, output_features, experts, format, dtype,
                         workspace.data()});
  return y;
}

namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& offsets, const std::optional<Tensor>& bias,
              int64_t format, int64_t output_features) {
  return quantized_linear(x, packed, offsets, bias, format, output_features);
}

PYMOE_OPERATOR_OF_THE_CPU("quantized_linear", linear,
                          "(Tensor x, Tensor packed, Tensor offsets, Tensor? bias, int format, int output_features) "
                          "-> Tensor")

}  // namespace
}  // namespace pymoe::ops::quantized_linear_op
