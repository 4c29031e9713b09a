// pymoe::expert_activation: see kernels/expert_activation.h for what it computes and
// pymoe/reference/expert_activation.py for its contract.
#include <torch/csrc/stable/library.h>

#include "kernels/expert_activation.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/twins.h"

namespace pymoe::ops::expert_activation_op {
namespace {

constexpr const char* kName = "expert_activation";

// `kind` counts the kinds in the order of pymoe.reference.expert_activation.KINDS.
Activation checked_kind(int64_t kind) {
  require(kind >= 0 && kind <= 2, kName, "kind must be 0 (swiglu), 1 (gelu) or 2 (relu), got ", kind);
  return static_cast<Activation>(kind);
}

int64_t checked_features(const Tensor& h, Activation kind) {
  require_shape(kName, "h", h, {-1, -1});
  if (kind != Activation::kSwiglu) return h.size(1);
  require(h.size(1) % 2 == 0, kName, "h must have shape (S, 2F) with an even second size, got ", h);
  return h.size(1) / 2;
}

Tensor expert_activation(const Tensor& h, int64_t kind) {
  const DType dtype = floating_dtype(kName, "h", h);
  const Activation activation = checked_kind(kind);
  const int64_t features = checked_features(h, activation);
  Tensor out = empty({h.size(0), features}, h.scalar_type(), h);
  const ExpertActivationArguments arguments{
      h.const_data_ptr(), out.mutable_data_ptr(), h.size(0), features, activation, dtype};
  run(PYMOE_TWINS(expert_activation), arguments, h);
  return out;
}

Tensor expert_activation_backward(const Tensor& grad, const Tensor& h, int64_t kind) {
  const DType dtype = floating_dtype(kName, "h", h);
  const Activation activation = checked_kind(kind);
  const int64_t features = checked_features(h, activation);
  require_tensor(kName, "grad", grad, h.scalar_type(), {h.size(0), features}, h);
  Tensor grad_h = empty({h.size(0), h.size(1)}, h.scalar_type(), h);
  const ExpertActivationBackwardArguments arguments{
      grad.const_data_ptr(), h.const_data_ptr(), grad_h.mutable_data_ptr(), h.size(0), features, activation, dtype};
  run(PYMOE_TWINS(expert_activation_backward), arguments, h);
  return grad_h;
}

PYMOE_OPERATOR("expert_activation", expert_activation, "(Tensor h, int kind) -> Tensor")
PYMOE_OPERATOR("expert_activation_backward", expert_activation_backward, "(Tensor grad, Tensor h, int kind) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::expert_activation_op
