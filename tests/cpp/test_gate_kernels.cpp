// Tests gate_topk and router_losses: compares choices with a sort, varies the number of threads, and checks guard
// bands.
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <numeric>
#include <stdexcept>

#include "kernels/gate_topk.h"
#include "kernels/router_losses.h"
#include "same_on_threads.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

template <typename T>
void check_gate(int64_t tokens, int64_t num_experts, int64_t choices) {
  using Wide = accumulate_t<T>;
  const auto logits = random_values<T>(tokens * num_experts, 1);
  const auto grad_weights = random_values<Wide>(tokens * choices, 2);
  const GateOptions options{Score::kSoftmax, true, 1.0};
  const auto [weights, experts, load] = same_on_threads(
      [&] {
        return std::tuple(Buffer<Wide>(tokens * choices), Buffer<int32_t>(tokens * choices),
                          Buffer<int32_t>(num_experts));
      },
      [&](auto& w, auto& e, auto& l) {
        cpu::gate_topk({dtype_of<T>(), logits.data(), nullptr, w.data(), e.data(), l.data(), tokens, num_experts,
                        choices, 0, 0, options});
      });
  std::vector<int32_t> order(static_cast<size_t>(num_experts)), counts(static_cast<size_t>(num_experts));
  int64_t wrong = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    std::iota(order.begin(), order.end(), 0);
    const auto logit = [&](int32_t e) { return to_accumulate(logits[static_cast<size_t>(t * num_experts + e)]); };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
    for (int64_t k = 0; k < choices; ++k) {
      wrong += experts[t * choices + k] != order[static_cast<size_t>(k)];
      ++counts[static_cast<size_t>(order[static_cast<size_t>(k)])];
    }
  }
  for (int64_t e = 0; e < num_experts; ++e) wrong += load[e] != counts[static_cast<size_t>(e)];
  CHECK(wrong == 0);
  same_on_threads([&] { return std::tuple(Buffer<T>(tokens * num_experts)); },
                  [&](auto& grad) {
                    cpu::gate_topk_backward({dtype_of<T>(), logits.data(), experts.data(), grad_weights.data(),
                                             grad.data(), tokens, num_experts, choices, true, options});
                  });

  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    const RouterLossesInput input{dtype_of<T>(), logits.data(), tokens, num_experts, load.data(), false, true, score};
    same_on_threads([&] { return std::tuple(Buffer<Wide>(1), Buffer<Wide>(1)); },
                    [&](auto& balance, auto& z) {
                      std::vector<double> workspace(static_cast<size_t>(router_losses_workspace(tokens)));
                      cpu::router_losses({input, balance.data(), z.data(), workspace.data()});
                    });
    const Wide one = 1;
    same_on_threads([&] { return std::tuple(Buffer<T>(tokens * num_experts)); },
                    [&](auto& grad) { cpu::router_losses_backward({input, &one, &one, grad.data()}); });
  }
}

}  // namespace

TEST_CASE("gate_topk and router_losses, forward and backward") {
  check_gate<float>(700, 64, 2);
  check_gate<float>(33, 160, 6);
  check_gate<BFloat16>(300, 8, 8);
  check_gate<Float16>(65, 257, 4);
  check_gate<double>(40, 3, 1);
  check_gate<float>(40, 64, 12);
  check_gate<BFloat16>(40, 64, 20);
  check_gate<double>(40, 64, 20);
  check_gate<float>(5, 1, 1);
  check_gate<float>(0, 4, 2);
}

TEST_CASE("gate_topk_backward refuses an expert outside [0, E)") {
  const auto logits = random_values<float>(10 * 8, 1), grad_weights = random_values<float>(20, 2);
  for (const int32_t hostile : {-1, 8, INT_MAX, INT_MIN}) {
    std::vector<int32_t> experts(20, 3);
    experts[11] = hostile;
    const WithThreads backend(4);
    Buffer<float> grad(10 * 8);
    CHECK_THROWS_AS(cpu::gate_topk_backward({DType::kFloat32,
                                             logits.data(),
                                             experts.data(),
                                             grad_weights.data(),
                                             grad.data(),
                                             10,
                                             8,
                                             2,
                                             true,
                                             {Score::kSoftmax, true, 1.0}}),
                    std::out_of_range);
    CHECK(grad.intact());
  }
}
