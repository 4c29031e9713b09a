// Runs the kernels of a layer on the full shapes of the design: 4096 tokens with 8 choices, rows of 7168 elements, 128
// or 256 experts. Each is compared with its CPU twin, as exactly as in tests/cuda_on_cpu: bit for bit, except dweights.
//
// The matrix products have the sizes of one published layer, OLMoE's first: S 32768, H 2048, N 2048, E 64. A product of
// rows of 7168 with the weights of 256 experts would need 15 GB for these and an hour; its tiles differ from those of
// this layer only in the number of steps. So in addition to the layer, one product with that depth runs for the rows of
// one expert.
#include <numeric>

#include "cuda_on_cpu/harness.h"
#include "cuda_on_cpu/slots.h"
#include "kernels/build_routing.h"
#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/expert_activation.h"
#include "kernels/gate_topk.h"
#include "kernels/grouped_linear.h"
#include "kernels/router_losses.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

constexpr int64_t kTokens = 4096, kChoices = 8, kRows = kTokens * kChoices, kHidden = 7168, kFeatures = 2048;

// Returns multiples of 1/16 in [-4, 4), in any type; drawing normal numbers would take longer than the kernels.
template <typename T>
Buffer<T> numbers(int64_t count, uint64_t seed) {
  Buffer<T> buffer(count);
  std::minstd_rand bits(static_cast<uint32_t>(seed + 1));
  for (T& value : buffer) value = round_to<T>(static_cast<float>(bits() % 128) / 16 - 4);
  return buffer;
}

// Returns whole numbers from -2 to 2: sums of their products are exact in fp32, so the order of a sum does not matter.
template <typename T>
Buffer<T> whole_numbers(int64_t count, uint64_t seed) {
  Buffer<T> buffer(count);
  std::minstd_rand bits(static_cast<uint32_t>(seed + 1));
  for (T& value : buffer) value = round_to<T>(static_cast<float>(bits() % 5) - 2);
  return buffer;
}

template <typename T>
void check_gate(int64_t experts, GateOptions options, bool biased, int64_t num_groups, int64_t topk_groups) {
  using S = accumulate_t<T>;
  Random random(7);
  Buffer<T> logits(kTokens * experts);
  fill(logits, random);
  Buffer<S> bias(experts);
  fill(bias, random);
  struct Outputs {
    Buffer<S> weights{kRows};
    Buffer<int32_t> experts{kRows}, load;
  } expected{.load = Buffer<int32_t>(experts)}, out{.load = Buffer<int32_t>(experts)};
  GateTopkArguments a{dtype_of<T>(),
                      logits.data(),
                      biased ? bias.data() : nullptr,
                      expected.weights.data(),
                      expected.experts.data(),
                      expected.load.data(),
                      kTokens,
                      experts,
                      kChoices,
                      num_groups,
                      topk_groups,
                      options};
  cpu::gate_topk(a);
  Buffer<unsigned char> workspace(cuda::gate_topk_workspace(a));
  a.workspace = workspace.data(), a.weights = out.weights.data();
  a.experts = out.experts.data(), a.load = out.load.data();
  cuda::gate_topk(a, nullptr);
  CHECK(out.experts.same(expected.experts));
  CHECK(out.load.same(expected.load));
  CHECK(out.weights.same(expected.weights));

  const auto grad = numbers<S>(kRows, 8);
  Buffer<T> expected_grad(logits.size()), out_grad(logits.size());
  GateTopkBackwardArguments b{
      dtype_of<T>(), logits.data(), expected.experts.data(), grad.data(), expected_grad.data(), kTokens,
      experts,       kChoices,      a.chooses_on_logits(),   options};
  cpu::gate_topk_backward(b);
  Buffer<unsigned char> backward_workspace(cuda::gate_topk_backward_workspace(b));
  b.workspace = backward_workspace.data(), b.grad_logits = out_grad.data();
  cuda::gate_topk_backward(b, nullptr);
  CHECK(same_values(out_grad, expected_grad));
}

template <typename T>
void check_combine(bool backward) {
  using S = accumulate_t<T>;
  Random random(3);
  Slots slots(random, kTokens, kChoices, 0.0);
  const auto y = numbers<T>(kRows * kHidden, 1);
  const auto weights = numbers<S>(kRows, 2);
  const CombineInput input{y.data(), slots.slot.data(), weights.data(), kTokens, kChoices,
                           kRows,    kHidden,           dtype_of<T>()};
  if (!backward) {
    Buffer<T> expected(kTokens * kHidden), out(kTokens * kHidden);
    cpu::combine({input, expected.data()});
    cuda::combine({input, out.data()}, nullptr);
    CHECK(out.same(expected));
    return;
  }
  const auto grad = numbers<T>(kTokens * kHidden, 4);
  Buffer<T> expected(y.size()), dy(y.size());
  Buffer<S> expected_dweights(kRows), dweights(kRows);
  CombineBackwardArguments a{input, grad.data(), slots.used.data(), expected.data(), expected_dweights.data()};
  cpu::combine_backward(a);
  a.dy = dy.data(), a.dweights = dweights.data();
  cuda::combine_backward(a, nullptr);
  CHECK(dy.same(expected));
  // Multiples of 1/256 below 2^17: exact in any order.
  CHECK(dweights.same(expected_dweights));
}

template <typename T>
void check_activation(Activation kind) {
  const auto h = numbers<T>(kRows * 2 * kFeatures, 5);
  const auto grad = numbers<T>(kRows * kFeatures, 6);
  Buffer<T> expected(grad.size()), out(grad.size()), expected_h(h.size()), grad_h(h.size());
  const auto arguments = [&](const T* from, T* to) {
    return ExpertActivationArguments{from, h.data(), to, kRows, kFeatures, kind, dtype_of<T>()};
  };
  cpu::expert_activation(arguments(nullptr, expected.data()));
  cuda::expert_activation(arguments(nullptr, out.data()), nullptr);
  CHECK(out.same(expected));
  cpu::expert_activation_backward(arguments(grad.data(), expected_h.data()));
  cuda::expert_activation_backward(arguments(grad.data(), grad_h.data()), nullptr);
  CHECK(grad_h.same(expected_h));
}

// The product, or one of its gradients, of rows that are randomly assigned to the experts.
enum class Product { kForward, kInputGrad, kWeightGrad };

template <typename T>
void check_product(Product product, int64_t rows, int64_t input, int64_t output, int64_t experts) {
  Random random(9);
  Buffer<int32_t> offsets(experts + 1), workspace(cuda::grouped_linear_workspace(experts));
  for (int32_t& offset : offsets) offset = 0;
  for (int64_t row = 0; row < rows; ++row) ++offsets[random.between(1, experts)];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  const auto x = whole_numbers<T>(rows * input, 10), grad = whole_numbers<T>(rows * output, 11);
  const auto weight = whole_numbers<T>(experts * output * input, 12);
  const int64_t count = product == Product::kForward     ? rows * output
                        : product == Product::kInputGrad ? rows * input
                                                         : experts * output * input;
  Buffer<T> expected(count), out(count);
  const auto run = [&](Buffer<T>& to, auto&& linear, auto&& weight_grad) {
    GroupedArguments common{offsets.data(), to.data(), rows, input, output, experts, dtype_of<T>(), workspace.data()};
    if (product == Product::kWeightGrad) {
      weight_grad(GroupedWeightGradArguments{common, {grad.data(), output, 1}, {x.data(), input, 1}});
    } else if (product == Product::kForward) {
      linear(GroupedLinearArguments{common, {x.data(), input, 1}, {weight.data(), input, 1}, output * input, {}});
    } else {
      std::swap(common.input_features, common.output_features);
      linear(GroupedLinearArguments{common, {grad.data(), output, 1}, {weight.data(), 1, input}, output * input, {}});
    }
  };
  run(
      expected, [](const auto& a) { cpu::grouped_linear(a); },
      [](const auto& a) { cpu::grouped_linear_weight_grad(a); });
  run(
      out, [](const auto& a) { cuda::grouped_linear(a, nullptr); },
      [](const auto& a) { cuda::grouped_linear_weight_grad(a, nullptr); });
  CHECK(out.same(expected));
}

constexpr GateOptions kSoftmax{Score::kSoftmax, true, 1.0}, kSigmoid{Score::kSigmoid, true, 2.5};

}  // namespace

TEST_CASE("design: gate_topk and its backward, T 4096, E 128, K 8") {
  check_gate<float>(128, kSoftmax, false, 0, 0);
  check_gate<BFloat16>(128, kSoftmax, false, 0, 0);
  check_gate<float>(128, kSigmoid, true, 0, 0);
}

TEST_CASE("design: gate_topk and its backward, T 4096, E 256, K 8, 4 of 8 groups") {
  check_gate<float>(256, kSigmoid, true, 8, 4);
}

TEST_CASE("design: router_losses and their backward, T 4096, E 128 and 256") {
  for (const int64_t experts : {128, 256}) {
    const auto logits = numbers<float>(kTokens * experts, 13);
    Buffer<int32_t> load(experts);
    for (int32_t& count : load) count = static_cast<int32_t>(kRows / experts);
    Buffer<float> losses(2), expected(2), grads(2), grad_logits(logits.size()), expected_logits(logits.size());
    Buffer<double> workspace(router_losses_workspace(kTokens));
    grads[0] = 0.5f, grads[1] = 2.0f;
    const RouterLossesInput input{DType::kFloat32, logits.data(), kTokens, experts,
                                  load.data(),     false,         true,    Score::kSoftmax};
    cpu::router_losses({input, &expected[0], &expected[1], workspace.data()});
    cuda::router_losses({input, &losses[0], &losses[1], workspace.data()}, nullptr);
    CHECK(worst_error(losses, expected, 1e-6, 0) <= 1);
    cpu::router_losses_backward({input, &grads[0], &grads[1], expected_logits.data()});
    cuda::router_losses_backward({input, &grads[0], &grads[1], grad_logits.data()}, nullptr);
    CHECK(worst_error(grad_logits, expected_logits, 1e-5, 1e-9) <= 1);
  }
}

TEST_CASE("design: build_routing, T 4096, K 8, E 128 and 256") {
  for (const int64_t experts : {128, 256}) {
    Random random(14);
    Buffer<int32_t> named(kRows);
    for (int32_t& expert : named) expert = static_cast<int32_t>(random.between(0, experts - 1));
    struct Outputs {
      Buffer<int32_t> slot{kRows}, token{kRows}, offsets;
    } expected{.offsets = Buffer<int32_t>(experts + 1)}, out{.offsets = Buffer<int32_t>(experts + 1)};
    const auto arguments = [&](Outputs& to, Buffer<int32_t>& workspace) {
      return BuildRoutingArguments{named.data(),     false,   to.slot.data(), to.token.data(), to.offsets.data(),
                                   workspace.data(), kTokens, kChoices,       experts,         kRows};
    };
    Buffer<int32_t> cpu_workspace(cpu::build_routing_workspace(kRows, experts));
    Buffer<int32_t> workspace(cuda::build_routing_workspace(kRows, experts));
    cpu::build_routing(arguments(expected, cpu_workspace));
    cuda::build_routing(arguments(out, workspace), nullptr);
    CHECK(out.slot.same(expected.slot));
    CHECK(out.token.same(expected.token));
    CHECK(out.offsets.same(expected.offsets));
  }
}

TEST_CASE("design: dispatch, T 4096, K 8, H 7168, bfloat16") {
  Random random(15);
  Slots slots(random, kTokens, kChoices, 0.0);
  const auto x = numbers<BFloat16>(kTokens * kHidden, 16);
  Buffer<BFloat16> expected(kRows * kHidden), out(kRows * kHidden);
  DispatchArguments a{x.data(), slots.slot.data(), slots.used.data(), expected.data(), kTokens, kChoices,
                      kRows,    kHidden * 2};
  cpu::dispatch(a);
  a.out = out.data();
  cuda::dispatch(a, nullptr);
  CHECK(out.same(expected));
}

TEST_CASE("design: combine, T 4096, K 8, H 7168, bfloat16") { check_combine<BFloat16>(false); }
TEST_CASE("design: combine, T 4096, K 8, H 7168, float32") { check_combine<float>(false); }
TEST_CASE("design: combine_backward, T 4096, K 8, H 7168, bfloat16") { check_combine<BFloat16>(true); }

TEST_CASE("design: swiglu and its backward, S 32768, F 2048, bfloat16") {
  check_activation<BFloat16>(Activation::kSwiglu);
}

TEST_CASE("design: grouped_linear, S 32768, H 2048, N 2048, E 64, bfloat16") {
  check_product<BFloat16>(Product::kForward, kRows, 2048, 2048, 64);
}
TEST_CASE("design: grouped_linear's input gradient, S 32768, H 2048, N 2048, E 64, bfloat16") {
  check_product<BFloat16>(Product::kInputGrad, kRows, 2048, 2048, 64);
}
TEST_CASE("design: grouped_linear's weight gradient, S 32768, H 2048, N 2048, E 64, bfloat16") {
  check_product<BFloat16>(Product::kWeightGrad, kRows, 2048, 2048, 64);
}
TEST_CASE("design: grouped_linear and its gradients of one expert of 128, H 7168, N 4096, bfloat16") {
  for (const auto product : {Product::kForward, Product::kInputGrad, Product::kWeightGrad}) {
    check_product<BFloat16>(product, 128, kHidden, 2 * kFeatures, 1);
  }
}
