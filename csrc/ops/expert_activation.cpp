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

// Checks the arguments, then computes and returns the result of the forward, or of the backward if `grad` is given.
// `kind` is an index into KINDS of pymoe/_common/types.py, or len(KINDS) for the clamped swiglu.
Tensor run_checked(Twins<ExpertActivationArguments> twins, const std::optional<Tensor>& grad, const Tensor& h,
                   int64_t kind, SwigluClamp<double> clamp, bool interleaved, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& offsets, const Tensor* used = nullptr) {
  const DType dtype = floating_dtype(kName, "h", h);
  constexpr auto kLast = Activation::kClampedSwiglu;
  require(kind >= 0 && kind <= static_cast<int64_t>(kLast), kName, "kind must be in 0..", static_cast<int64_t>(kLast),
          ", got ", kind);
  require(!interleaved || static_cast<Activation>(kind) == kLast, kName, "interleaved is for the clamped swiglu alone");
  require_shape(kName, "h", h, {-1, -1});
  const bool gated = is_gated(static_cast<Activation>(kind));
  require(!gated || h.size(1) % 2 == 0, kName, "h must have shape (S, 2F) with an even second size, got ", h);
  const int64_t rows = h.size(0), features = gated ? h.size(1) / 2 : h.size(1);
  if (grad) require_tensor(kName, "grad", *grad, h.scalar_type(), {rows, features}, h);
  Tensor out = empty_in(used, rows, grad ? h.size(1) : features, h);
  const ExpertActivationArguments arguments{grad ? grad->const_data_ptr() : nullptr,
                                            h.const_data_ptr(),
                                            out.mutable_data_ptr(),
                                            rows,
                                            features,
                                            static_cast<Activation>(kind),
                                            dtype,
                                            clamp,
                                            interleaved,
                                            checked_biases(kName, bias, offsets, h.size(1), h)};
  run(twins, arguments, h);
  return out;
}

}  // namespace

Tensor expert_activation(const Tensor& h, int64_t kind, double limit, double alpha, double up_offset, bool interleaved,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& offsets, const Tensor* used) {
  return run_checked(PYMOE_TWINS(expert_activation), std::nullopt, h, kind, {limit, alpha, up_offset}, interleaved,
                     bias, offsets, used);
}

namespace {

Tensor forward(const Tensor& h, int64_t kind, double limit, double alpha, double up_offset, bool interleaved,
               const std::optional<Tensor>& bias, const std::optional<Tensor>& offsets) {
  return expert_activation(h, kind, limit, alpha, up_offset, interleaved, bias, offsets);
}

Tensor expert_activation_backward(const Tensor& grad, const Tensor& h, int64_t kind, double limit, double alpha,
                                  double up_offset, bool interleaved, const std::optional<Tensor>& bias,
                                  const std::optional<Tensor>& offsets) {
  return run_checked(PYMOE_TWINS(expert_activation_backward), grad, h, kind, {limit, alpha, up_offset}, interleaved,
                     bias, offsets);
}

PYMOE_OPERATOR("expert_activation", forward,
               "(Tensor h, int kind, float limit=0., float alpha=1., float up_offset=0., bool interleaved=False, "
               "Tensor? bias=None, Tensor? offsets=None) -> Tensor")
PYMOE_OPERATOR("expert_activation_backward", expert_activation_backward,
               "(Tensor grad, Tensor h, int kind, float limit=0., float alpha=1., float up_offset=0., bool "
               "interleaved=False, Tensor? bias=None, Tensor? offsets=None) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::expert_activation_op
