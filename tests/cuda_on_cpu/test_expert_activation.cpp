// Tests expert_activation and its backward: the emulated CUDA kernels must give the CPU kernels' bits.
#include <cmath>
#include <random>

#include "cuda_on_cpu/harness.h"
#include "cuda_on_cpu/slots.h"
#include "kernels/expert_activation.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

// Returns values that reach every branch: usual ones, far tails, and special values.
template <typename T>
void fill_wide(Buffer<T>& buffer, Random& random) {
  using S = accumulate_t<T>;
  fill(buffer, random, random.one_of({0.0, 0.1}));
  const bool wide = random.chance(0.5);
  for (T& value : buffer) {
    if (!wide || !random.chance(0.3)) continue;
    value = round_to<T>(static_cast<S>(random.number() * random.one_of({10.0, 90.0, 1e30})));
  }
}

struct Shape {
  Activation kind;
  bool interleaved;
  int64_t rows, features, shift;

  explicit Shape(Random& random)
      : kind(static_cast<Activation>(random.between(0, static_cast<int>(Activation::kClampedSwiglu)))),
        interleaved(kind == Activation::kClampedSwiglu && random.chance(0.5)),
        rows(random.between(0, size(random.chance(0.3) ? 70 : 8, 8))),
        features(random.between(0, random.chance(0.2) ? size(random.chance(0.2) ? 9000 : 1100, 500) : 40)),
        shift(random.chance(0.6) ? 0 : random.between(1, 7)) {
    if (random.chance(0.6)) features = (features + 7) / 8 * 8;
  }

  int64_t outputs() const { return rows * features; }
  template <typename T>
  ExpertActivationArguments arguments(const T* grad, const T* h, T* out, const ExpertBiases& biases = {}) const {
    return {grad, h, out, rows, features, kind, dtype_of<T>(), {0.75, 1.702, 1.0}, interleaved, biases};
  }
  int64_t inputs() const { return outputs() * (is_gated(kind) ? 2 : 1); }

  // Results have the same bits, except in fp64 with erfc, which two different libraries compute: up to rounding.
  template <typename T>
  bool agree(const Buffer<T>& got, const Buffer<T>& expected) const {
    const bool by_library = kind == Activation::kGelu || kind == Activation::kGeglu;
    if (kOwnFunctions && by_library && std::is_same_v<T, double>) return worst_error(got, expected, 1e-12, 1e-12) <= 1;
    return same_values(got, expected);
  }
};

}  // namespace

TEST_CASE("expert_activation: the emulated kernels give the CPU twin's bits, forward and backward") {
  for_cases("expert_activation", 120, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Shape shape(random);
      Buffer<T> h(shape.inputs(), shape.shift), expected(shape.outputs()), out(shape.outputs(), shape.shift);
      fill_wide(h, random);
      const int64_t width = shape.features * (is_gated(shape.kind) ? 2 : 1);
      const RandomBiases<T> random_biases(random, random.between(0, shape.rows), width,
                                          random.chance(0.8) ? shape.shift : 1);
      const ExpertBiases biases = random.chance(0.5) ? random_biases.of() : ExpertBiases{};
      cpu::expert_activation(shape.arguments<T>(nullptr, h.data(), expected.data(), biases));
      cuda::expert_activation(shape.arguments<T>(nullptr, h.data(), out.data(), biases), nullptr);
      CHECK(shape.agree(out, expected));
      CHECK(out.intact());

      Buffer<T> grad(shape.outputs(), random.chance(0.8) ? shape.shift : 0);
      Buffer<T> expected_h(shape.inputs()), grad_h(shape.inputs(), shape.shift);
      fill(grad, random, random.one_of({0.0, 0.05}));
      cpu::expert_activation_backward(shape.arguments<T>(grad.data(), h.data(), expected_h.data(), biases));
      cuda::expert_activation_backward(shape.arguments<T>(grad.data(), h.data(), grad_h.data(), biases), nullptr);
      CHECK(shape.agree(grad_h, expected_h));
      CHECK(grad_h.intact());
    });
  });
}

TEST_CASE("expert_activation: with any offsets, nothing outside of the biases is read") {
  for_cases("expert_activation hostile", 30, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Shape shape(random);
      Buffer<T> h(shape.inputs(), shape.shift), out(shape.outputs(), shape.shift), grad(shape.outputs(), shape.shift);
      Buffer<T> grad_h(shape.inputs(), shape.shift);
      fill(h, random);
      fill(grad, random);
      RandomBiases<T> biases(random, shape.rows, shape.features * (is_gated(shape.kind) ? 2 : 1), shape.shift);
      biases.spoil(random);
      cuda::expert_activation(shape.arguments<T>(nullptr, h.data(), out.data(), biases.of()), nullptr);
      cuda::expert_activation_backward(shape.arguments<T>(grad.data(), h.data(), grad_h.data(), biases.of()), nullptr);
      CHECK(out.intact());
      CHECK(grad_h.intact());
    });
  });
}

TEST_CASE("expert_of_row: the expert between whose offsets a row lies, whatever experts have no rows") {
  Random random(1);
  for (int i = 0; i < 400; ++i) {
    const int64_t experts = random.between(0, 40), rows = random.between(0, 60);
    Buffer<int32_t> offsets(experts + 1);
    for (int32_t& value : offsets) value = static_cast<int32_t>(random.between(0, rows));
    offsets[0] = 0;
    std::sort(offsets.begin(), offsets.end());
    for (int64_t row = 0; row < rows + 2; ++row) {
      int64_t expected = 0;
      while (expected < experts && !(offsets[expected] <= row && row < offsets[expected + 1])) ++expected;
      CHECK(expert_of_row(offsets.data(), experts, row) == expected);
    }
  }
}

// Two rows of 96 threads share a block; 96 is the only such number that is not a power of two.
TEST_CASE("expert_activation: every row of a block is found") {
  Random random(1);
  Shape shape(random);
  shape.kind = Activation::kSwiglu;
  shape.interleaved = false;
  shape.rows = 5, shape.features = 720;
  Buffer<float> h(shape.inputs()), expected(shape.outputs()), out(shape.outputs());
  fill_wide(h, random);
  cpu::expert_activation(shape.arguments<float>(nullptr, h.data(), expected.data()));
  cuda::expert_activation(shape.arguments<float>(nullptr, h.data(), out.data()), nullptr);
  CHECK(shape.agree(out, expected));
}

TEST_CASE("one_plus_exp: the bits of 1 + e^x for every x but NaN") {
  std::mt19937 bits(1);
  int different = 0;
  for (int i = 0; i < 300'000; ++i) {
    const auto anything = bit_cast<float>(static_cast<uint32_t>(bits()));
    const float near = static_cast<float>(i) * 1e-3f - 150.0f;
    for (const float x : {anything, near}) {
      if (x == x) different += one_plus_exp(x) != exp_in_fixed_steps(x) + 1.0f;
    }
    const double wide = static_cast<double>(i) * 6e-3 - 900.0;
    different += one_plus_exp(wide) != exp_in_fixed_steps(wide) + 1.0;
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double x : {-kInfinity, kInfinity, 709.78, 709.79}) {
    different += one_plus_exp(x) != exp_in_fixed_steps(x) + 1.0;
  }
  CHECK(different == 0);
}

// A GPU fuses these products and sums, which must not change any bit: the upper part of n ln 2, twice e^r, and e^r
// times a power of two, which may overflow.
template <typename S>
int differences_of_fused_steps() {
  using Steps = ExpSteps<S>;
  const auto differ = [](S a, S b, S c) { return std::fma(a, b, c) != a * b + c; };
  std::mt19937 bits(2);
  std::uniform_real_distribution<S> any(Steps::kLow, Steps::kHigh), fraction(S(-0.35), S(0.42));
  int different = 0;
  for (int n = static_cast<int>(Steps::kLow * S(1.5)); n <= Steps::kBias + 1; ++n) {
    for (int i = 0; i < 100; ++i) {
      const S less_one = fraction(bits), near = static_cast<S>(n) * S(0.6931471805599453) + less_one;
      for (const S x : {any(bits), near}) different += differ(static_cast<S>(-n), Steps::kLn2High, x);
      different += differ(less_one, S{2}, S{2});
      const S power = std::ldexp(S{1}, n - 1);
      if (n > 2 - Steps::kBias) different += differ(S{2} * less_one + S{2}, power, S{1});
    }
  }
  return different;
}

TEST_CASE("add_exact_product: where it stands, a fused multiply-add has the bits of a product and a sum") {
  CHECK(differences_of_fused_steps<float>() == 0);
  CHECK(differences_of_fused_steps<double>() == 0);
  CHECK(std::fma(1.1f, 1.1f, -1.21f) != 1.1f * 1.1f - 1.21f);  // elsewhere fusing does change bits
}
