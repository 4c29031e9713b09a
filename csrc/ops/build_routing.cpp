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

}  // namespace

std::tuple<Tensor, Tensor, Tensor> build_routing(const Tensor& experts, int64_t num_experts,
                                                 std::optional<int64_t> capacity, bool foreign) {
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
  const int64_t words = PYMOE_BY_TWIN(experts, cuda::build_routing_workspace(rows, num_experts),
                                      cpu::build_routing_workspace(rows, num_experts));
  const Workspace workspace(words, ScalarType::Int, experts);
  const BuildRoutingArguments arguments{
      experts.const_data_ptr(),
      wide,
      static_cast<int32_t*>(slot.mutable_data_ptr()),
      static_cast<int32_t*>(token.mutable_data_ptr()),
      static_cast<int32_t*>(offsets.mutable_data_ptr()),
      static_cast<int32_t*>(workspace.data()),
      experts.size(0),
      experts.size(1),
      num_experts,
      std::min(capacity.value_or(rows), rows),
      foreign,
  };
  run(PYMOE_TWINS(build_routing), arguments, experts);
  return {slot, token, offsets};
}

PYMOE_OPERATOR("build_routing", build_routing,
               "(Tensor experts, SymInt num_experts, SymInt? capacity, bool foreign=False) -> (Tensor, Tensor, Tensor)")

}  // namespace pymoe::ops::build_routing_op
