// pymoe::router_losses and its backward: see kernels/router_losses.h for what they compute and
// pymoe/reference/router_losses.py for the contract.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "kernels/router_losses.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/twins.h"

namespace pymoe::ops::router_losses_op {
namespace {

RouterLossesInput checked(const char* name, const Tensor& logits, const std::optional<Tensor>& load,
                          const std::string& score, bool with_z) {
  RouterLossesInput a{};
  a.dtype = floating_dtype(name, "logits", logits);
  require_shape(name, "logits", logits, {-1, -1});
  a.tokens = logits.size(0);
  a.num_experts = logits.size(1);
  require(a.num_experts >= 1, name, "logits must have shape (T, E) with E >= 1, got ", logits);
  if (load.has_value()) {
    a.load_is_int64 = load->scalar_type() == ScalarType::Long;
    const ScalarType dtype = a.load_is_int64 ? ScalarType::Long : ScalarType::Int;
    require_tensor(name, "load", *load, dtype, {a.num_experts}, logits);
    a.load = load->const_data_ptr();
  }
  a.with_z = with_z;
  a.score = score_named(name, score);
  a.logits = logits.const_data_ptr();
  return a;
}

std::tuple<Tensor, Tensor> router_losses(const Tensor& logits, std::optional<Tensor> load, std::string score,
                                         bool with_z) {
  const RouterLossesInput input = checked("router_losses", logits, load, score, with_z);
  Tensor balance = empty({}, accumulate_scalar_type(input.dtype), logits);
  Tensor z = empty({}, accumulate_scalar_type(input.dtype), logits);
  Tensor workspace = empty({router_losses_workspace(input.tokens)}, ScalarType::Double, logits);
  const RouterLossesArguments arguments{input, balance.mutable_data_ptr(), z.mutable_data_ptr(),
                                        static_cast<double*>(workspace.mutable_data_ptr())};
  run(PYMOE_TWINS(router_losses), arguments, logits);
  return {balance, z};
}

Tensor router_losses_backward(const Tensor& grad_balance, const Tensor& grad_z, const Tensor& logits,
                              std::optional<Tensor> load, std::string score, bool with_z) {
  constexpr const char* kName = "router_losses_backward";
  const RouterLossesInput input = checked(kName, logits, load, score, with_z);
  require_tensor(kName, "grad_balance", grad_balance, accumulate_scalar_type(input.dtype), {}, logits);
  require_tensor(kName, "grad_z", grad_z, accumulate_scalar_type(input.dtype), {}, logits);
  Tensor grad_logits = empty({input.tokens, input.num_experts}, logits.scalar_type(), logits);
  const RouterLossesBackwardArguments arguments{input, grad_balance.const_data_ptr(), grad_z.const_data_ptr(),
                                                grad_logits.mutable_data_ptr()};
  run(PYMOE_TWINS(router_losses_backward), arguments, logits);
  return grad_logits;
}

PYMOE_OPERATOR("router_losses", router_losses,
               "(Tensor logits, Tensor? load, str score, bool with_z) -> (Tensor, Tensor)")
PYMOE_OPERATOR("router_losses_backward", router_losses_backward,
               "(Tensor grad_balance, Tensor grad_z, Tensor logits, Tensor? load, str score, bool with_z) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::router_losses_op
