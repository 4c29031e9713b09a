// pymoe::build_routing: see kernels/build_routing.h for what it computes and pymoe/reference/build_routing.py for its
// contract.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels/build_routing.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::build_routing_op {
namespace {

constexpr const char* kName = "build_routing";
constexpr int64_t kRowLimit = int64_t{1} << 31;  // rows are numbered in int32

// Sorts the choices with the gate's counts, and writes the load. Only the CUDA twin can use the counts.
void run_counted([[maybe_unused]] const BuildRoutingArguments& a, [[maybe_unused]] const gate_topk_op::Chosen& chosen) {
#if PYMOE_WITH_CUDA
  auto* const load = static_cast<int32_t*>(chosen.load.mutable_data_ptr());
  const CountedRoutingArguments counted{a, chosen.counts, load};
  run(Twins<CountedRoutingArguments>{nullptr, &cuda::build_routing_counted}, counted, chosen.experts);
#endif
}

// Checks the arguments, sorts the choices by expert, and returns (slot, token, offsets). `counted`: the gate's result,
// if the gate has counted the choices; null otherwise.
std::tuple<Tensor, Tensor, Tensor> sort(const Tensor& experts, int64_t num_experts, std::optional<int64_t> capacity,
                                        bool foreign, const gate_topk_op::Chosen* counted) {
  const bool wide = experts.scalar_type() == ScalarType::Long;
  require_dtype(kName, "experts", experts, wide ? ScalarType::Long : ScalarType::Int);
  require_shape(kName, "experts", experts, {-1, -1});
  const int64_t rows = experts.numel();
  require(rows < kRowLimit, kName, "experts must hold fewer than 2^31 choices, got ", experts);
  require(num_experts >= 1 && num_experts < kRowLimit, kName, "num_experts must be in 1..2^31 - 1, got ", num_experts);
  require(!capacity || *capacity >= 0, kName, "capacity must be None or at least 0, got ", capacity.value_or(0));

  Tensor slot = empty({experts.size(0), experts.size(1)}, ScalarType::Int, experts);
  Tensor token = empty({rows}, ScalarType::Int, experts);
  Tensor offsets = empty({num_experts + 1}, ScalarType::Int, experts);
  BuildRoutingArguments a{};
  a.experts = experts.const_data_ptr();
  a.wide = wide;
  a.slot = static_cast<int32_t*>(slot.mutable_data_ptr());
  a.token = static_cast<int32_t*>(token.mutable_data_ptr());
  a.offsets = static_cast<int32_t*>(offsets.mutable_data_ptr());
  a.tokens = experts.size(0);
  a.choices = experts.size(1);
  a.num_experts = num_experts;
  a.capacity = std::min(capacity.value_or(rows), rows);
  a.foreign = foreign;
  if (counted != nullptr) {
    run_counted(a, *counted);
    return {slot, token, offsets};
  }
  const int64_t words = PYMOE_BY_TWIN(experts, cuda::build_routing_workspace(rows, num_experts),
                                      cpu::build_routing_workspace(rows, num_experts));
  const Workspace workspace(words, ScalarType::Int, experts);
  a.workspace = static_cast<int32_t*>(workspace.data());
  run(PYMOE_TWINS(build_routing), a, experts);
  return {slot, token, offsets};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> build_routing(const Tensor& experts, int64_t num_experts,
                                                 std::optional<int64_t> capacity, bool foreign) {
  return sort(experts, num_experts, capacity, foreign, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> build_routing_of(const gate_topk_op::Chosen& chosen,
                                                    std::optional<int64_t> capacity) {
  const bool counted = chosen.counts.tiles > 0;
  return sort(chosen.experts, chosen.load.size(0), capacity, false, counted ? &chosen : nullptr);
}

PYMOE_OPERATOR("build_routing", build_routing,
               "(Tensor experts, SymInt num_experts, SymInt? capacity, bool foreign=False) -> (Tensor, Tensor, Tensor)")

}  // namespace pymoe::ops::build_routing_op
