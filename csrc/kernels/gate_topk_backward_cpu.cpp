#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "kernels/cpu/checked_index.h"
#include "kernels/cpu/parallel.h"
#include "kernels/gate_topk.h"

#define PYMOE_ISA_BODY "kernels/gate_topk_backward_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {

void gate_topk_backward(const GateTopkBackwardArguments& a) {
  if (a.tokens == 0) return;
  const auto gate_backward_tokens = PYMOE_SELECT_ISA(gate_backward_tokens);
  const int64_t grain = std::max<int64_t>(1, (int64_t{16} << 10) / (a.num_experts + 8 * a.choices));
  parallel_for(0, a.tokens, grain, [&](int64_t begin, int64_t end) {
    // Room for two rows of E values (scores, gradients) and two of K, at most 8 bytes per element.
    const std::unique_ptr<double[]> scratch(new double[static_cast<size_t>(2 * a.num_experts + 2 * a.choices)]);
    gate_backward_tokens(a, begin, end, scratch.get());
  });
}

}  // namespace pymoe::cpu
