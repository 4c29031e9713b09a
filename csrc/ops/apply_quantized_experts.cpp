// pymoe::apply_quantized_experts: what apply_experts is, with quantised weights: build_routing, dispatch,
// quantized_linear, expert_activation, quantized_linear and combine in one call from Python.
//
//     y[t] = sum over k, in order, of weights[t, k] * network of experts[t, k] (x[t])
//
// `layout` is bits and output features of w_in, bits and output features of w_out. All tensors are contiguous.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::apply_quantized_experts_op {
namespace {

constexpr const char* kName = "apply_experts";

Tensor apply_quantized_experts(const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& w_in,
                               const std::optional<Tensor>& b_in, const Tensor& w_out,
                               const std::optional<Tensor>& b_out, const std::vector<int64_t>& layout, int64_t kind,
                               std::optional<int64_t> capacity, bool foreign, double limit, double alpha,
                               double up_offset, bool interleaved) {
  require(layout.size() == 4, kName, "layout must have 4 entries, got ", layout.size());
  require(w_in.dim() == 3, kName, "w_in.packed must have shape (E, tiles, bytes), got ", w_in);
  require_same_device(kName, "experts", experts, x);
  const auto [slot, token, offsets] = build_routing_op::build_routing(experts, w_in.size(0), capacity, foreign);
  Tensor rows = dispatch_op::dispatch(x, slot, offsets);
  rows = quantized_linear_op::quantized_linear(rows, w_in, offsets, b_in, layout[0], layout[1]);
  rows = expert_activation_op::expert_activation(rows, kind, limit, alpha, up_offset, interleaved);
  rows = quantized_linear_op::quantized_linear(rows, w_out, offsets, b_out, layout[2], layout[3]);
  return combine_op::combine(rows, slot, weights);
}

PYMOE_OPERATOR_OF_THE_CPU("apply_quantized_experts", apply_quantized_experts,
                          "(Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? "
                          "b_out, int[] layout, int kind, SymInt? capacity, bool foreign, float limit=0., float "
                          "alpha=1., float up_offset=0., bool interleaved=False) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::apply_quantized_experts_op
