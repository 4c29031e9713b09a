// pymoe::expert_activation: see kernels/expert_activation.h for what it computes and
// pymoe/reference/expert_activation.py for its contract.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "kernels/expert_activation.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::expert_activation_op {
namespace {

constexpr const char* kName = "expert_activation";

// The forward, or the backward where there is a `grad`. `kind` counts the kinds in the order of
// pymoe.reference.expert_activation.KINDS.
Tensor run_checked(Twins<ExpertActivationArguments> twins, const std::optional<Tensor>& grad, const Tensor& h,
                   int64_t kind) {
  const DType dtype = floating_dtype(kName, "h", h);
  require(kind >= 0 && kind <= 2, kName, "kind must be 0 (swiglu), 1 (gelu) or 2 (relu), got ", kind);
  require_shape(kName, "h", h, {-1, -1});
  const bool gated = static_cast<Activation>(kind) == Activation::kSwiglu;
  require(!gated || h.size(1) % 2 == 0, kName, "h must have shape (S, 2F) with an even second size, got ", h);
  const int64_t rows = h.size(0), features = gated ? h.size(1) / 2 : h.size(1);
  if (grad) require_tensor(kName, "grad", *grad, h.scalar_type(), {rows, features}, h);
  Tensor out = empty({rows, grad ? h.size(1) : features}, h.scalar_type(), h);
  const ExpertActivationArguments arguments{grad ? grad->const_data_ptr() : nullptr,
                                            h.const_data_ptr(),
                                            out.mutable_data_ptr(),
                                            rows,
                                            features,
                                            static_cast<Activation>(kind),
                                            dtype};
  run(twins, arguments, h);
  return out;
}

}  // namespace

Tensor expert_activation(const Tensor& h, int64_t kind) {
  return run_checked(PYMOE_TWINS(expert_activation), std::nullopt, h, kind);
}

namespace {

Tensor expert_activation_backward(const Tensor& grad, const Tensor& h, int64_t kind) {
  return run_checked(PYMOE_TWINS(expert_activation_backward), grad, h, kind);
}

PYMOE_OPERATOR("expert_activation", expert_activation, "(Tensor h, int kind) -> Tensor")
PYMOE_OPERATOR("expert_activation_backward", expert_activation_backward, "(Tensor grad, Tensor h, int kind) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::expert_activation_op
