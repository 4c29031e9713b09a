// pymoe::combine and pymoe::combine_backward: see kernels/combine.h for what they compute and
// pymoe/reference/combine.py for their contract.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "kernels/combine.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/twins.h"

namespace pymoe::ops::combine_op {
namespace {

// Guards common to both; returns the dtype of y.
DType check_rows(const char* name, const Tensor& y, const Tensor& slot, const std::optional<Tensor>& weights) {
  const DType dtype = floating_dtype(name, "y", y);
  require_dtype(name, "slot", slot, ScalarType::Int);
  require_shape(name, "slot", slot, {-1, -1});
  require_same_device(name, "slot", slot, y);
  require_shape(name, "y", y, {slot.numel(), -1});
  if (weights) {
    require_dtype(name, "weights", *weights, accumulate_scalar_type(dtype));
    require_shape(name, "weights", *weights, {slot.size(0), slot.size(1)});
    require_same_device(name, "weights", *weights, y);
  }
  return dtype;
}

Tensor combine(const Tensor& y, const Tensor& slot, std::optional<Tensor> weights) {
  const DType dtype = check_rows("combine", y, slot, weights);
  Tensor out = empty({slot.size(0), y.size(1)}, y.scalar_type(), y);
  const CombineArguments arguments{
      y.const_data_ptr(),
      static_cast<const int32_t*>(slot.const_data_ptr()),
      weights ? weights->const_data_ptr() : nullptr,
      out.mutable_data_ptr(),
      slot.size(0),
      slot.size(1),
      y.size(1),
      dtype,
  };
  run(PYMOE_TWINS(combine), arguments, y);
  return out;
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad, const Tensor& y, const Tensor& weights,
                                            const Tensor& slot, const Tensor& offsets, bool need_dy,
                                            bool need_dweights) {
  constexpr const char* name = "combine_backward";
  const DType dtype = check_rows(name, y, slot, weights);
  require_dtype(name, "grad", grad, y.scalar_type());
  require_shape(name, "grad", grad, {slot.size(0), y.size(1)});
  require_same_device(name, "grad", grad, y);
  require_dtype(name, "offsets", offsets, ScalarType::Int);
  require_shape(name, "offsets", offsets, {-1});
  require(offsets.size(0) >= 1, name, "offsets must have E + 1 entries, got none");
  require_same_device(name, "offsets", offsets, y);
  Tensor dy = empty({need_dy ? y.size(0) : 0, y.size(1)}, y.scalar_type(), y);
  Tensor dweights = empty({need_dweights ? slot.size(0) : 0, slot.size(1)}, weights.scalar_type(), y);
  const CombineBackwardArguments arguments{
      grad.const_data_ptr(),
      y.const_data_ptr(),
      static_cast<const int32_t*>(slot.const_data_ptr()),
      static_cast<const int32_t*>(offsets.const_data_ptr()) + offsets.size(0) - 1,
      weights.const_data_ptr(),
      need_dy ? dy.mutable_data_ptr() : nullptr,
      need_dweights ? dweights.mutable_data_ptr() : nullptr,
      slot.size(0),
      slot.size(1),
      y.size(1),
      dtype,
  };
  run(PYMOE_TWINS(combine_backward), arguments, y);
  return {dy, dweights};
}

STABLE_TORCH_LIBRARY_FRAGMENT(pymoe, library) {
  library.def("combine(Tensor y, Tensor slot, Tensor? weights) -> Tensor");
  library.def(
      "combine_backward(Tensor grad, Tensor y, Tensor weights, Tensor slot, Tensor offsets, bool need_dy, "
      "bool need_dweights) -> (Tensor, Tensor)");
}

template <typename Library>
void implement(Library& library) {
  library.impl("combine", TORCH_BOX(&combine));
  library.impl("combine_backward", TORCH_BOX(&combine_backward));
}
PYMOE_IMPLEMENT_ON_EVERY_DEVICE(implement)

}  // namespace
}  // namespace pymoe::ops::combine_op
