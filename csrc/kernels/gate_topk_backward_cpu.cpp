#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cpu/parallel.h"
#include "kernels/gate_topk.h"

namespace pymoe::cpu {
namespace {

[[noreturn]] void throw_bad_expert(int64_t token, int64_t choice, int64_t expert, int64_t num_experts) {
  throw std::out_of_range("gate_topk_backward: experts must lie in [0, E) (E = " + std::to_string(num_experts) +
                          "), got " + std::to_string(expert) + " at [" + std::to_string(token) + ", " +
                          std::to_string(choice) + "]");
}

}  // namespace
}  // namespace pymoe::cpu

#define PYMOE_ISA_BODY "kernels/gate_topk_backward_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {

void gate_topk_backward(const GateTopkBackwardArguments& a) {
  if (a.tokens == 0) return;
  const auto gate_backward_tokens = PYMOE_SELECT_ISA(gate_backward_tokens);
  const int64_t grain = std::max<int64_t>(1, (int64_t{16} << 10) / (a.num_experts + 8 * a.choices));
  parallel_for(0, a.tokens, grain, [&](int64_t begin, int64_t end) {
    // One row of scores and three of the choices, 8 bytes an element at most.
    const std::unique_ptr<double[]> scratch(new double[static_cast<size_t>(2 * a.num_experts + 2 * a.choices)]);
    gate_backward_tokens(a, begin, end, scratch.get());
  });
}

}  // namespace pymoe::cpu
