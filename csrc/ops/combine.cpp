// pymoe::combine and pymoe::combine_backward: see kernels/combine.h for what they compute and
// pymoe/reference/combine.py for their contract.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "kernels/combine.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::combine_op {
namespace {

CombineInput checked(const char* name, const Tensor& y, const Tensor& slot, const std::optional<Tensor>& weights,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& offsets) {
  const DType dtype = floating_dtype(name, "y", y);
  require_tensor(name, "slot", slot, ScalarType::Int, {-1, -1}, y);
  require_shape(name, "y", y, {-1, -1});
  if (weights) {
    require_tensor(name, "weights", *weights, accumulate_scalar_type(dtype), {slot.size(0), slot.size(1)}, y);
  }
  return {y.const_data_ptr(),
          static_cast<const int32_t*>(slot.const_data_ptr()),
          weights ? weights->const_data_ptr() : nullptr,
          slot.size(0),
          slot.size(1),
          y.size(0),
          y.size(1),
          dtype,
          checked_biases(name, bias, offsets, y.size(1), y)};
}

}  // namespace

Tensor combine(const Tensor& y, const Tensor& slot, std::optional<Tensor> weights, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& offsets) {
  const CombineInput input = checked("combine", y, slot, weights, bias, offsets);
  Tensor out = empty({slot.size(0), y.size(1)}, y.scalar_type(), y);
  run(PYMOE_TWINS(combine), CombineArguments{input, out.mutable_data_ptr()}, y);
  return out;
}

namespace {

std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad, const Tensor& y, const Tensor& weights,
                                            const Tensor& slot, const Tensor& offsets, bool need_dy, bool need_dweights,
                                            const std::optional<Tensor>& bias) {
  constexpr const char* name = "combine_backward";
  const CombineInput input = checked(name, y, slot, weights, bias, offsets);
  require_tensor(name, "grad", grad, y.scalar_type(), {slot.size(0), y.size(1)}, y);
  const int32_t* bounds = checked_offsets(name, offsets, y);
  Tensor dy = empty({need_dy ? y.size(0) : 0, y.size(1)}, y.scalar_type(), y);
  Tensor dweights = empty({need_dweights ? slot.size(0) : 0, slot.size(1)}, weights.scalar_type(), y);
  const CombineBackwardArguments arguments{input, grad.const_data_ptr(), bounds + offsets.size(0) - 1,
                                           need_dy ? dy.mutable_data_ptr() : nullptr,
                                           need_dweights ? dweights.mutable_data_ptr() : nullptr};
  run(PYMOE_TWINS(combine_backward), arguments, y);
  return {dy, dweights};
}

PYMOE_OPERATOR("combine", combine,
               "(Tensor y, Tensor slot, Tensor? weights, Tensor? bias=None, Tensor? offsets=None) -> Tensor")
PYMOE_OPERATOR("combine_backward", combine_backward,
               "(Tensor grad, Tensor y, Tensor weights, Tensor slot, Tensor offsets, bool need_dy, bool need_dweights, "
               "Tensor? bias=None) -> (Tensor, Tensor)")

}  // namespace
}  // namespace pymoe::ops::combine_op
