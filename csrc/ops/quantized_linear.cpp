// pymoe::quantized_linear: see kernels/quantized_linear.h for what it computes and
// pymoe/reference/quantized_linear.py for its contract.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
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

// The checked arguments that the forward and the gradient of x have in common.
struct Call {
  DType dtype;
  WeightFormat format;
  int64_t rows;
  int64_t experts;
  const int32_t* offsets;
  int32_t all[2];              // offsets to use if `offsets` is null: all rows go to the only expert
  std::vector<int64_t> shape;  // of the result

  const int32_t* bounds() const { return offsets == nullptr ? all : offsets; }
};

// Checks all arguments of a product or its gradient, except the bias. `rows` is x, (..., H), if is_forward, else the
// gradient of the result, (..., N). `number` is the number of the weight format. The output has `columns` columns.
Call checked(bool is_forward, const Tensor& rows, const Tensor& packed, const Tensor* offsets, int64_t number,
             int64_t columns) {
  const char *argument = is_forward ? "x" : "grad", *size = is_forward ? "H" : "N";
  const char* other = is_forward ? "output_features" : "input_features";
  Call call{};
  call.dtype = floating_dtype(kName, argument, rows);
  require(call.dtype != DType::kFloat64, kName, argument, " must have dtype float32, bfloat16 or float16, got double");
  if (offsets != nullptr) require_shape(kName, argument, rows, {-1, -1});
  require(rows.dim() >= 1 && rows.is_contiguous(), kName, argument, " must have shape (..., ", size,
          ") and be contiguous, got ", rows);
  call.format = weight_format(kName, number);
  require(columns >= 0 && columns <= kMostFeatures, kName, other, " must be at least 0 and at most ", kMostFeatures,
          ", got ", columns);
  call.shape.assign(rows.sizes().begin(), rows.sizes().end());
  const int64_t own = call.shape.back();
  call.shape.back() = columns;
  call.rows = std::accumulate(call.shape.begin(), call.shape.end() - 1, int64_t{1}, std::multiplies<>());
  require(own <= kMostFeatures, kName, argument, " must have at most ", kMostFeatures, " columns, got ", own);
  require(offsets != nullptr || call.rows <= std::numeric_limits<int32_t>::max(), kName, argument,
          " has too many rows: ", call.rows);
  call.all[1] = static_cast<int32_t>(call.rows);
  call.offsets = offsets == nullptr ? nullptr : checked_offsets(kName, *offsets, rows);
  call.experts = offsets == nullptr ? 1 : offsets->size(0) - 1;
  const auto [inputs, outputs] = is_forward ? std::pair(own, columns) : std::pair(columns, own);
  require_tensor(kName, "packed", packed, ScalarType::Byte,
                 {call.experts, quantized_tiles(outputs), quantized_tile_bytes(call.format, inputs)}, rows);
  return call;
}

}  // namespace

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const Tensor* offsets, const std::optional<Tensor>& bias,
                        int64_t number, int64_t output_features, const Tensor* used) {
  const Call call = checked(true, x, packed, offsets, number, output_features);
  const int64_t inputs = x.size(x.dim() - 1);
  if (bias) require_tensor(kName, "bias", *bias, x.scalar_type(), {call.experts, output_features}, x);
  Tensor y = offsets == nullptr ? empty({call.shape.data(), call.shape.size()}, x.scalar_type(), x)
                                : empty_in(used, call.rows, output_features, x);
  const Workspace workspace(quantized_linear_workspace(call.rows, inputs, call.format), ScalarType::Byte, x);
  cpu::quantized_linear({x.const_data_ptr(), static_cast<const uint8_t*>(packed.const_data_ptr()), call.bounds(),
                         bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), call.rows, inputs,
                         output_features, call.experts, call.format, call.dtype, workspace.data()});
  return y;
}

namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& offsets,
              const std::optional<Tensor>& bias, int64_t format, int64_t output_features) {
  return quantized_linear(x, packed, offsets ? &*offsets : nullptr, bias, format, output_features);
}

Tensor input_grad(const Tensor& grad, const Tensor& packed, const std::optional<Tensor>& offsets, int64_t number,
                  int64_t input_features) {
  const Call call = checked(false, grad, packed, offsets ? &*offsets : nullptr, number, input_features);
  Tensor input_grad = empty({call.shape.data(), call.shape.size()}, grad.scalar_type(), grad);
  cpu::quantized_linear_input_grad({grad.const_data_ptr(), static_cast<const uint8_t*>(packed.const_data_ptr()),
                                    call.bounds(), input_grad.mutable_data_ptr(), call.rows, input_features,
                                    grad.size(grad.dim() - 1), call.experts, call.format, call.dtype});
  return input_grad;
}

PYMOE_OPERATOR_OF_THE_CPU("quantized_linear", linear,
                          "(Tensor x, Tensor packed, Tensor? offsets, Tensor? bias, int format, int output_features) "
                          "-> Tensor")
PYMOE_OPERATOR_OF_THE_CPU("quantized_linear_input_grad", input_grad,
                          "(Tensor grad, Tensor packed, Tensor? offsets, int format, int input_features) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::quantized_linear_op
