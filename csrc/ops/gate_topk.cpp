// pymoe::gate_topk and its backward: see kernels/gate_topk.h for what they compute and pymoe/reference/gate_topk.py for
// the contract. pymoe::gate_routing: gate_topk followed by build_routing of its choice.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "kernels/gate_topk.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::gate_topk_op {

Chosen choose(const Tensor& logits, const std::optional<Tensor>& bias, int64_t k, const std::string& score,
              bool renormalize, int64_t num_groups, int64_t topk_groups, double scale, bool counted) {
  constexpr const char* kName = "gate_topk";
  constexpr int64_t kLimit = int64_t{1} << 31;  // experts and loads are int32
  GateTopkArguments a{};
  a.dtype = floating_dtype(kName, "logits", logits);
  require_shape(kName, "logits", logits, {-1, -1});
  a.tokens = logits.size(0);
  a.num_experts = logits.size(1);
  a.choices = k;
  require(k >= 1 && k <= a.num_experts, kName, "k must be in 1..E (E = ", a.num_experts, "), got ", k);
  require(a.num_experts < kLimit, kName, "E must be below 2**31, got ", a.num_experts);
  require(a.tokens <= (kLimit - 1) / k, kName, "T * k must be below 2**31, got ", a.tokens, " * ", k);
  const ScalarType accumulated = accumulate_scalar_type(a.dtype);
  if (bias.has_value()) {
    require_tensor(kName, "bias", *bias, accumulated, {a.num_experts}, logits);
    a.bias = bias->const_data_ptr();
  }
  a.num_groups = num_groups;
  a.topk_groups = topk_groups;
  if (num_groups != 0) {
    require(num_groups >= 1 && num_groups <= a.num_experts && a.num_experts % num_groups == 0, kName,
            "num_groups must divide E (E = ", a.num_experts, "), got ", num_groups);
    require(topk_groups >= 1 && topk_groups <= num_groups, kName, "topk_groups must be in 1..num_groups (", num_groups,
            "), got ", topk_groups);
    require(topk_groups * (a.num_experts / num_groups) >= k, kName, "topk_groups must leave at least k = ", k,
            " experts to choose from, got ", topk_groups * (a.num_experts / num_groups));
  }
  a.options = {score_named(kName, score), renormalize, scale};

  Chosen chosen{empty({a.tokens, k}, accumulated, logits), empty({a.tokens, k}, ScalarType::Int, logits),
                empty({a.num_experts}, ScalarType::Int, logits)};
  a.logits = logits.const_data_ptr();
  a.weights = chosen.weights.mutable_data_ptr();
  a.experts = static_cast<int32_t*>(chosen.experts.mutable_data_ptr());
  a.load = static_cast<int32_t*>(chosen.load.mutable_data_ptr());
  if (counted) a.counts = PYMOE_BY_TWIN(logits, cuda::gate_topk_counts(a), ChoiceCounts{});
  if (a.counts.tiles > 0) {
    chosen.memory = empty({a.counts.size()}, ScalarType::Short, logits);  // 16 bits per count
    a.counts.values = static_cast<uint16_t*>(chosen.memory->mutable_data_ptr());
  }
  const Workspace workspace(PYMOE_BY_TWIN(logits, cuda::gate_topk_workspace(a), 0), ScalarType::Byte, logits);
  a.workspace = workspace.data();
  run(PYMOE_TWINS(gate_topk), a, logits);
  chosen.counts = a.counts;
  return chosen;
}

namespace {

std::tuple<Tensor, Tensor, Tensor> gate_topk(const Tensor& logits, std::optional<Tensor> bias, int64_t k,
                                             std::string score, bool renormalize, int64_t num_groups,
                                             int64_t topk_groups, double scale) {
  const Chosen chosen = choose(logits, bias, k, score, renormalize, num_groups, topk_groups, scale, false);
  return {chosen.weights, chosen.experts, chosen.load};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gate_routing(const Tensor& logits,
                                                                        std::optional<Tensor> bias, int64_t k,
                                                                        std::string score, bool renormalize,
                                                                        int64_t num_groups, int64_t topk_groups,
                                                                        double scale, std::optional<int64_t> capacity) {
  const Chosen chosen = choose(logits, bias, k, score, renormalize, num_groups, topk_groups, scale, true);
  const auto [slot, token, offsets] = build_routing_op::build_routing_of(chosen, capacity);
  return {chosen.weights, chosen.experts, chosen.load, slot, token, offsets};
}

Tensor gate_topk_backward(const Tensor& grad_weights, const Tensor& logits, const Tensor& experts, std::string score,
                          bool renormalize, bool chosen_on_logits, double scale, bool narrow) {
  constexpr const char* kName = "gate_topk_backward";
  GateTopkBackwardArguments a{};
  a.dtype = floating_dtype(kName, "logits", logits);
  require_shape(kName, "logits", logits, {-1, -1});
  require(logits.size(1) >= 1, kName, "logits must have shape (T, E) with E >= 1, got ", logits);
  require_tensor(kName, "experts", experts, ScalarType::Int, {logits.size(0), -1}, logits);
  require(experts.size(1) >= 1, kName, "experts must have shape (T, K) with K >= 1, got ", experts);
  require_tensor(kName, "grad_weights", grad_weights, accumulate_scalar_type(a.dtype),
                 {logits.size(0), experts.size(1)}, logits);

  if (narrow) require_dtype(kName, "logits", logits, ScalarType::Float);
  Tensor grad_logits =
      empty({logits.size(0), logits.size(1)}, narrow ? ScalarType::BFloat16 : logits.scalar_type(), logits);
  a.narrow = narrow;
  a.logits = logits.const_data_ptr();
  a.experts = static_cast<const int32_t*>(experts.const_data_ptr());
  a.grad_weights = grad_weights.const_data_ptr();
  a.grad_logits = grad_logits.mutable_data_ptr();
  a.tokens = logits.size(0);
  a.num_experts = logits.size(1);
  a.choices = experts.size(1);
  a.chosen_on_logits = chosen_on_logits;
  a.options = {score_named(kName, score), renormalize, scale};
  const Workspace workspace(PYMOE_BY_TWIN(logits, cuda::gate_topk_backward_workspace(a), 0), ScalarType::Byte, logits);
  a.workspace = workspace.data();
  run(PYMOE_TWINS(gate_topk_backward), a, logits);
  return grad_logits;
}

PYMOE_OPERATOR("gate_topk", gate_topk,
               "(Tensor logits, Tensor? bias, int k, str score, bool renormalize, int num_groups, int topk_groups, "
               "float scale) -> (Tensor, Tensor, Tensor)")
PYMOE_OPERATOR("gate_routing", gate_routing,
               "(Tensor logits, Tensor? bias, int k, str score, bool renormalize, int num_groups, int topk_groups, "
               "float scale, SymInt? capacity) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
PYMOE_OPERATOR("gate_topk_backward", gate_topk_backward,
               "(Tensor grad_weights, Tensor logits, Tensor experts, str score, bool renormalize, bool "
               "chosen_on_logits, float scale, bool narrow=False) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::gate_topk_op
