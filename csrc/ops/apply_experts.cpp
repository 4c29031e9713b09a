// pymoe::apply_experts: a whole mixture of expert networks in one call, for where no gradient is asked for. It computes
// what build_routing, dispatch, grouped_linear, expert_activation, grouped_linear and combine do one after the other,
// bit for bit, because it calls them; what it saves is the cost of five calls from Python.
//
//     y[t] = sum over k, in order, of weights[t, k] * network of experts[t, k] (x[t])
//
// Tensors but the weights and biases of the networks are contiguous.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::apply_experts_op {
namespace {

constexpr const char* kName = "apply_experts";

Tensor apply_experts(const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& w_in,
                     const std::optional<Tensor>& b_in, const Tensor& w_out, const std::optional<Tensor>& b_out,
                     int64_t kind, std::optional<int64_t> capacity, bool foreign, double limit, double alpha,
                     double up_offset, bool interleaved) {
  require(w_in.dim() == 3, kName, "w_in must have shape (E, N, H), got ", w_in);
  require(w_out.dim() == 3 && w_out.size(0) == w_in.size(0), kName, "w_out must have shape (", w_in.size(0),
          ", O, F), got ", w_out);
  require_same_device(kName, "experts", experts, x);
  const auto [slot, token, offsets] = build_routing_op::build_routing(experts, w_in.size(0), capacity, foreign);
  Tensor rows = dispatch_op::dispatch(x, slot, offsets);
  rows = grouped_linear_op::grouped_linear(rows, w_in, offsets, b_in);
  rows = expert_activation_op::expert_activation(rows, kind, limit, alpha, up_offset, interleaved);
  rows = grouped_linear_op::grouped_linear(rows, w_out, offsets, b_out);
  return combine_op::combine(rows, slot, weights);
}

PYMOE_OPERATOR("apply_experts", apply_experts,
               "(Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int "
               "kind, SymInt? capacity, bool foreign, float limit=0., float alpha=1., float up_offset=0., bool "
               "interleaved=False) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::apply_experts_op
