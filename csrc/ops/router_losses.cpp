// pymoe::router_losses and its backward: see kernels/router_losses.h for what they compute and
// pymoe/reference/router_losses.py for the contract.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "kernels/router_losses.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/score.h"
#include "ops/twins.h"

namespace pymoe::ops::router_losses_op {
namespace {

// Guards and fields common to forward and backward.
template <typename Arguments>
Arguments checked(const char* name, const Tensor& logits, const std::optional<Tensor>& load, const std::string& score,
                  bool with_z) {
  Arguments a{};
  a.dtype = floating_dtype(name, "logits", logits);
  require_shape(name, "logits", logits, {-1, -1});
  a.tokens = logits.size(0);
  a.num_experts = logits.size(1);
  require(a.num_experts >= 1, name, "logits must have shape (T, E) with E >= 1, got ", logits);
  if (load.has_value()) {
    a.load_is_int64 = load->scalar_type() == ScalarType::Long;
    if (!a.load_is_int64) require_dtype(name, "load", *load, ScalarType::Int);
    require_shape(name, "load", *load, {a.num_experts});
    require_same_device(name, "load", *load, logits);
    a.load = load->const_data_ptr();
  }
  a.with_z = with_z;
  a.score = score_named(name, score);
  a.logits = logits.const_data_ptr();
  return a;
}

std::tuple<Tensor, Tensor> router_losses(const Tensor& logits, std::optional<Tensor> load, std::string score,
                                         bool with_z) {
  auto a = checked<RouterLossesArguments>("router_losses", logits, load, score, with_z);
  Tensor balance = empty({}, accumulate_scalar_type(a.dtype), logits);
  Tensor z = empty({}, accumulate_scalar_type(a.dtype), logits);
  Tensor workspace = empty({router_losses_workspace(a.tokens)}, ScalarType::Double, logits);
  a.balance = balance.mutable_data_ptr();
  a.z = z.mutable_data_ptr();
  a.workspace = static_cast<double*>(workspace.mutable_data_ptr());
  run(PYMOE_TWINS(router_losses), a, logits);
  return {balance, z};
}

Tensor router_losses_backward(const Tensor& grad_balance, const Tensor& grad_z, const Tensor& logits,
                              std::optional<Tensor> load, std::string score, bool with_z) {
  constexpr const char* kName = "router_losses_backward";
  auto a = checked<RouterLossesBackwardArguments>(kName, logits, load, score, with_z);
  require_dtype(kName, "grad_balance", grad_balance, accumulate_scalar_type(a.dtype));
  require_shape(kName, "grad_balance", grad_balance, {});
  require_same_device(kName, "grad_balance", grad_balance, logits);
  require_dtype(kName, "grad_z", grad_z, accumulate_scalar_type(a.dtype));
  require_shape(kName, "grad_z", grad_z, {});
  require_same_device(kName, "grad_z", grad_z, logits);
  Tensor grad_logits = empty({a.tokens, a.num_experts}, logits.scalar_type(), logits);
  a.grad_balance = grad_balance.const_data_ptr();
  a.grad_z = grad_z.const_data_ptr();
  a.grad_logits = grad_logits.mutable_data_ptr();
  run(PYMOE_TWINS(router_losses_backward), a, logits);
  return grad_logits;
}

STABLE_TORCH_LIBRARY_FRAGMENT(pymoe, library) {
  library.def("router_losses(Tensor logits, Tensor? load, str score, bool with_z) -> (Tensor, Tensor)");
  library.def(
      "router_losses_backward(Tensor grad_balance, Tensor grad_z, Tensor logits, Tensor? load, str score, "
      "bool with_z) -> Tensor");
}

template <typename Library>
void implement(Library& library) {
  library.impl("router_losses", TORCH_BOX(&router_losses));
  library.impl("router_losses_backward", TORCH_BOX(&router_losses_backward));
}
PYMOE_IMPLEMENT_ON_EVERY_DEVICE(implement)

}  // namespace
}  // namespace pymoe::ops::router_losses_op
