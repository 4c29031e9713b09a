// pymoe::apply_experts: a whole mixture of expert networks in one call, for use without gradients. It computes the same
// bits as build_routing, dispatch, grouped_linear, expert_activation, grouped_linear and combine one after the other,
// because it calls them. It saves the cost of five calls from Python and up to half of the memory for intermediate
// results: the activation and the second product write their output to the memory that held the input of the step
// before them, if that memory is suitable (empty_in in ops/allocate.h; torch's grouped product always needs new
// memory).
//
//     y[t] = sum over k, in order, of weights[t, k] * network of experts[t, k] (x[t])
//
// pymoe::apply_chosen_experts: gate_topk, then apply_experts with the chosen experts, also without gradients; returns
// (y, load).
//
// pymoe::apply_quantized_experts and pymoe::apply_chosen_quantized_experts: as apply_experts and apply_chosen_experts,
// but with quantised weights and quantized_linear. `layout` contains the format and the number of output features of
// w_in, then those of w_out, and optionally what to prefetch (prefetch.h).
//
// pymoe::apply_experts_recorded and pymoe::apply_chosen_experts_recorded: apply_experts and apply_chosen_experts for
// use with gradients. They also return the tensors that a backward pass reads (pymoe/nn/recorded.py): (y, rows, inner,
// active, outer, slot, token, offsets), with chosen experts followed by the gate's (load, weights, experts). So no step
// reuses memory here.
//
// torch's grouped product adds no bias. On a GPU on which it multiplies bf16 rows, apply_experts and
// apply_chosen_experts leave b_in to expert_activation and b_out to combine, as pymoe/nn/apply_experts.py does. The
// recorded calls are for the CPU (pymoe/nn/recorded.py) and add the biases in the products.
//
// Tensors are contiguous, except for the weights and biases of networks that are not quantised.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/check.h"
#include "ops/operators.h"
#include "ops/prefetch.h"
#include "ops/twins.h"

namespace pymoe::ops::apply_experts_op {
namespace {

constexpr const char* kName = "apply_experts";

using Routing = std::tuple<Tensor, Tensor, Tensor>;

// Returns the weighted sum of the networks' outputs for every token. `networks` is called with the tokens' rows, sorted
// by expert, and their offsets.
template <typename Networks>
Tensor apply(const Tensor& x, const Routing& routing, const Tensor& weights, const Networks& networks) {
  const auto& [slot, token, offsets] = routing;
  const Tensor rows = networks(dispatch_op::dispatch(x, slot, offsets), offsets);
  return combine_op::combine(rows, slot, weights, networks.left_to_combine(rows), offsets);
}

// Returns true if the biases for rows like `x` are added after the products, by the operators that follow.
bool adds_later(const Tensor& x) {
  return on_cuda(x) && x.scalar_type() == ScalarType::BFloat16 &&
         grouped_linear_op::torch_multiplies(x.is_cpu() ? 0 : x.get_device_index());
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& bias) {
  return bias ? std::optional<Tensor>(torch::stable::contiguous(*bias)) : std::nullopt;
}

Routing route(const Tensor& x, const Tensor& experts, int64_t num_experts, std::optional<int64_t> capacity,
              bool foreign) {
  require_same_device(kName, "experts", experts, x);
  return build_routing_op::build_routing(experts, num_experts, capacity, foreign);
}

// Networks whose weights are not quantised. ops/grouped_linear.cpp describes the promise `whole`.
struct Networks {
  const Tensor &w_in, &w_out;
  const std::optional<Tensor>&b_in, &b_out;
  bool whole;
  int64_t kind;
  double limit, alpha, up_offset;
  bool interleaved;

  Tensor operator()(const Tensor& rows, const Tensor& offsets) const {
    const bool later = (b_in || b_out) && adds_later(rows);
    const std::optional<Tensor> none;
    const Tensor inner =
        grouped_linear_op::grouped_linear(rows, w_in, offsets, later ? none : b_in, std::nullopt, nullptr, whole);
    const Tensor active = expert_activation_op::expert_activation(inner, kind, limit, alpha, up_offset, interleaved,
                                                                  later ? contiguous(b_in) : none, offsets, &rows);
    return grouped_linear_op::grouped_linear(active, w_out, offsets, later ? none : b_out, std::nullopt, &inner, whole);
  }

  std::optional<Tensor> left_to_combine(const Tensor& rows) const {
    return b_out && adds_later(rows) ? contiguous(b_out) : std::nullopt;
  }
};

void require_weights(const Tensor& w_in, const Tensor& w_out) {
  require(w_in.dim() == 3, kName, "w_in must have shape (E, N, H), got ", w_in);
  require(w_out.dim() == 3 && w_out.size(0) == w_in.size(0), kName, "w_out must have shape (", w_in.size(0),
          ", O, F), got ", w_out);
}

Tensor apply_experts(const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& w_in,
                     const std::optional<Tensor>& b_in, const Tensor& w_out, const std::optional<Tensor>& b_out,
                     int64_t kind, std::optional<int64_t> capacity, bool foreign, double limit, double alpha,
                     double up_offset, bool interleaved) {
  require_weights(w_in, w_out);
  const bool whole = !capacity.has_value() && !foreign;
  const Networks networks{w_in, w_out, b_in, b_out, whole, kind, limit, alpha, up_offset, interleaved};
  return apply(x, route(x, experts, w_in.size(0), capacity, foreign), weights, networks);
}

gate_topk_op::Chosen choose_for(const Tensor& x, const Tensor& logits, const std::optional<Tensor>& bias, int64_t k,
                                const std::string& score, bool renormalize, int64_t num_groups, int64_t topk_groups,
                                double scale, const Tensor& w_in) {
  constexpr const char* kName = "apply_chosen_experts";
  require_same_device(kName, "logits", logits, x);
  require(logits.dim() == 2 && logits.size(1) == w_in.size(0), kName, "logits must have shape (T, ", w_in.size(0),
          "), got ", logits);
  return gate_topk_op::choose(logits, bias, k, score, renormalize, num_groups, topk_groups, scale, true);
}

std::tuple<Tensor, Tensor> apply_chosen_experts(const Tensor& x, const Tensor& logits,
                                                const std::optional<Tensor>& bias, int64_t k, std::string score,
                                                bool renormalize, int64_t num_groups, int64_t topk_groups, double scale,
                                                const Tensor& w_in, const std::optional<Tensor>& b_in,
                                                const Tensor& w_out, const std::optional<Tensor>& b_out, int64_t kind,
                                                std::optional<int64_t> capacity, double limit, double alpha,
                                                double up_offset, bool interleaved) {
  require_weights(w_in, w_out);
  const auto chosen = choose_for(x, logits, bias, k, score, renormalize, num_groups, topk_groups, scale, w_in);
  const Networks networks{w_in, w_out, b_in, b_out, !capacity, kind, limit, alpha, up_offset, interleaved};
  const Routing routing = build_routing_op::build_routing_of(chosen, capacity);
  return {apply(x, routing, chosen.weights, networks), chosen.load};
}

// The result, and the tensors that one step makes and the backward pass reads.
struct Steps {
  Tensor y, rows, inner, active, outer;
};

Steps apply_recorded(const Tensor& x, const Routing& routing, const Tensor& weights, const Networks& n) {
  const auto& [slot, token, offsets] = routing;
  const Tensor rows = dispatch_op::dispatch(x, slot, offsets);
  const Tensor inner = grouped_linear_op::grouped_linear(rows, n.w_in, offsets, n.b_in, std::nullopt, nullptr, n.whole);
  const Tensor active =
      expert_activation_op::expert_activation(inner, n.kind, n.limit, n.alpha, n.up_offset, n.interleaved);
  const Tensor outer =
      grouped_linear_op::grouped_linear(active, n.w_out, offsets, n.b_out, std::nullopt, nullptr, n.whole);
  return {combine_op::combine(outer, slot, weights), rows, inner, active, outer};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> apply_experts_recorded(
    const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& w_in,
    const std::optional<Tensor>& b_in, const Tensor& w_out, const std::optional<Tensor>& b_out, int64_t kind,
    std::optional<int64_t> capacity, bool foreign, double limit, double alpha, double up_offset, bool interleaved) {
  require_weights(w_in, w_out);
  const bool whole = !capacity.has_value() && !foreign;
  const Networks networks{w_in, w_out, b_in, b_out, whole, kind, limit, alpha, up_offset, interleaved};
  const Routing routing = route(x, experts, w_in.size(0), capacity, foreign);
  const Steps s = apply_recorded(x, routing, weights, networks);
  const auto& [slot, token, offsets] = routing;
  return {s.y, s.rows, s.inner, s.active, s.outer, slot, token, offsets};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
apply_chosen_experts_recorded(const Tensor& x, const Tensor& logits, const std::optional<Tensor>& bias, int64_t k,
                              std::string score, bool renormalize, int64_t num_groups, int64_t topk_groups,
                              double scale, const Tensor& w_in, const std::optional<Tensor>& b_in, const Tensor& w_out,
                              const std::optional<Tensor>& b_out, int64_t kind, std::optional<int64_t> capacity,
                              double limit, double alpha, double up_offset, bool interleaved) {
  require_weights(w_in, w_out);
  const auto chosen = choose_for(x, logits, bias, k, score, renormalize, num_groups, topk_groups, scale, w_in);
  const Networks networks{w_in, w_out, b_in, b_out, !capacity, kind, limit, alpha, up_offset, interleaved};
  const Routing routing = build_routing_op::build_routing_of(chosen, capacity);
  const Steps s = apply_recorded(x, routing, chosen.weights, networks);
  const auto& [slot, token, offsets] = routing;
  return {s.y, s.rows, s.inner, s.active, s.outer, slot, token, offsets, chosen.load, chosen.weights, chosen.experts};
}

// Networks with quantised weights.
struct QuantizedNetworks {
  const Tensor &w_in, &w_out;
  const std::optional<Tensor>&b_in, &b_out;
  const std::vector<int64_t>& layout;
  int64_t kind;
  double limit, alpha, up_offset;
  bool interleaved;

  Tensor operator()(const Tensor& rows, const Tensor& offsets) const {
    if (layout.size() == 5) {
      for (const Tensor* weights : {&w_in, &w_out}) prefetch_chosen(*weights, offsets, Prefetch{layout[4]});
    }
    const Tensor inner = quantized_linear_op::quantized_linear(rows, w_in, &offsets, b_in, layout[0], layout[1]);
    const Tensor active = expert_activation_op::expert_activation(inner, kind, limit, alpha, up_offset, interleaved,
                                                                  std::nullopt, std::nullopt, &rows);
    return quantized_linear_op::quantized_linear(active, w_out, &offsets, b_out, layout[2], layout[3], &inner);
  }

  static std::optional<Tensor> left_to_combine(const Tensor&) { return std::nullopt; }
};

void require_quantized(const Tensor& w_in, const std::vector<int64_t>& layout) {
  require(layout.size() == 4 || layout.size() == 5, kName, "layout must have 4 or 5 entries, got ", layout.size());
  require(w_in.dim() == 3, kName, "w_in.packed must have shape (E, tiles, bytes), got ", w_in);
}

Tensor apply_quantized_experts(const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& w_in,
                               const std::optional<Tensor>& b_in, const Tensor& w_out,
                               const std::optional<Tensor>& b_out, const std::vector<int64_t>& layout, int64_t kind,
                               std::optional<int64_t> capacity, bool foreign, double limit, double alpha,
                               double up_offset, bool interleaved) {
  require_quantized(w_in, layout);
  const QuantizedNetworks networks{w_in, w_out, b_in, b_out, layout, kind, limit, alpha, up_offset, interleaved};
  return apply(x, route(x, experts, w_in.size(0), capacity, foreign), weights, networks);
}

std::tuple<Tensor, Tensor> apply_chosen_quantized_experts(
    const Tensor& x, const Tensor& logits, const std::optional<Tensor>& bias, int64_t k, std::string score,
    bool renormalize, int64_t num_groups, int64_t topk_groups, double scale, const Tensor& w_in,
    const std::optional<Tensor>& b_in, const Tensor& w_out, const std::optional<Tensor>& b_out,
    const std::vector<int64_t>& layout, int64_t kind, std::optional<int64_t> capacity, double limit, double alpha,
    double up_offset, bool interleaved) {
  require_quantized(w_in, layout);
  const auto chosen = choose_for(x, logits, bias, k, score, renormalize, num_groups, topk_groups, scale, w_in);
  const QuantizedNetworks networks{w_in, w_out, b_in, b_out, layout, kind, limit, alpha, up_offset, interleaved};
  return {apply(x, build_routing_op::build_routing_of(chosen, capacity), chosen.weights, networks), chosen.load};
}

PYMOE_OPERATOR("apply_experts", apply_experts,
               "(Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int "
               "kind, SymInt? capacity, bool foreign, float limit=0., float alpha=1., float up_offset=0., bool "
               "interleaved=False) -> Tensor")
PYMOE_OPERATOR("apply_chosen_experts", apply_chosen_experts,
               "(Tensor x, Tensor logits, Tensor? bias, int k, str score, bool renormalize, int num_groups, int "
               "topk_groups, float scale, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int kind, SymInt? "
               "capacity, float limit=0., float alpha=1., float up_offset=0., bool interleaved=False) -> (Tensor, "
               "Tensor)")
PYMOE_OPERATOR("apply_experts_recorded", apply_experts_recorded,
               "(Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int "
               "kind, SymInt? capacity, bool foreign, float limit=0., float alpha=1., float up_offset=0., bool "
               "interleaved=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
PYMOE_OPERATOR("apply_chosen_experts_recorded", apply_chosen_experts_recorded,
               "(Tensor x, Tensor logits, Tensor? bias, int k, str score, bool renormalize, int num_groups, int "
               "topk_groups, float scale, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int kind, SymInt? "
               "capacity, float limit=0., float alpha=1., float up_offset=0., bool interleaved=False) -> (Tensor, "
               "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
PYMOE_OPERATOR_OF_THE_CPU("apply_quantized_experts", apply_quantized_experts,
                          "(Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? "
                          "b_out, int[] layout, int kind, SymInt? capacity, bool foreign, float limit=0., float "
                          "alpha=1., float up_offset=0., bool interleaved=False) -> Tensor")

PYMOE_OPERATOR_OF_THE_CPU(
    "apply_chosen_quantized_experts", apply_chosen_quantized_experts,
    "(Tensor x, Tensor logits, Tensor? bias, int k, str score, bool renormalize, int num_groups, "
    "int topk_groups, float scale, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int[] "
    "layout, int kind, SymInt? capacity, float limit=0., float alpha=1., float up_offset=0., bool "
    "interleaved=False) -> (Tensor, Tensor)")

}  // namespace
}  // namespace pymoe::ops::apply_experts_op
