// pymoe::quantized_linear: see kernels/quantized_linear.h for what it computes and
// pymoe/reference/quantized_linear.py for its contract.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

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

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const Tensor* offsets, const std::optional<Tensor>& bias,
                        int64_t number, int64_t output_features, const Tensor* used) {
  const DType dtype = floating_dtype(kName, "x", x);
  require(dtype != DType::kFloat64, kName, "x must have dtype float32, bfloat16 or float16, got double");
  if (offsets != nullptr) require_shape(kName, "x", x, {-1, -1});
  require(x.dim() >= 1 && x.is_contiguous(), kName, "x must have shape (..., H) and be contiguous, got ", x);
  const WeightFormat format = weight_format(kName, number);
  require(output_features >= 0 && output_features <= kMostFeatures, kName,
          "output_features must be at least 0 and at most ", kMostFeatures, ", got ", output_features);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  const int64_t inputs = shape.back();
  shape.back() = output_features;
  const int64_t rows = std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>());
  require(inputs <= kMostFeatures, kName, "x must have at most ", kMostFeatures, " columns, got ", inputs);
  require(offsets != nullptr || rows <= std::numeric_limits<int32_t>::max(), kName, "x has too many rows: ", rows);
  const int32_t all[] = {0, static_cast<int32_t>(rows)};
  const int32_t* bounds = offsets == nullptr ? all : checked_offsets(kName, *offsets, x);
  const int64_t experts = offsets == nullptr ? 1 : offsets->size(0) - 1;
  require_tensor(kName, "packed", packed, ScalarType::Byte,
                 {experts, quantized_tiles(output_features), quantized_tile_bytes(format, inputs)}, x);
  if (bias) require_tensor(kName, "bias", *bias, x.scalar_type(), {experts, output_features}, x);
  Tensor y = offsets == nullptr ? empty({shape.data(), shape.size()}, x.scalar_type(), x)
                                : empty_in(used, rows, output_features, x);
  const Workspace workspace(quantized_linear_workspace(rows, inputs, format), ScalarType::Byte, x);
  cpu::quantized_linear({x.const_data_ptr(), static_cast<const uint8_t*>(packed.const_data_ptr()), bounds,
                         bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), rows, inputs, output_features,
                         experts, format, dtype, workspace.data()});
  return y;
}

namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& offsets,
              const std::optional<Tensor>& bias, int64_t format, int64_t output_features) {
  return quantized_linear(x, packed, offsets ? &*offsets : nullptr, bias, format, output_features);
}

PYMOE_OPERATOR_OF_THE_CPU("quantized_linear", linear,
                          "(Tensor x, Tensor packed, Tensor? offsets, Tensor? bias, int format, int output_features) "
                          "-> Tensor")

}  // namespace
}  // namespace pymoe::ops::quantized_linear_op
