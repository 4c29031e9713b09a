// Tests combine and its backward: the emulated CUDA kernels must give the CPU kernels' bits, except in dweights, whose
// sums have another order.
#include "cuda_on_cpu/harness.h"
#include "cuda_on_cpu/slots.h"
#include "kernels/combine.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

int64_t random_hidden(Random& random) {
  if (random.chance(0.15)) return random.between(1, size(2300, 300));
  const int64_t hidden = random.between(0, 70);
  return random.chance(0.5) ? hidden * 8 : hidden;
}

struct Shape {
  int64_t tokens, choices, hidden, shift;

  explicit Shape(Random& random)
      : tokens(random.between(0, size(random.chance(0.3) ? 60 : 9, 5))),
        choices(random.one_of<int64_t>({1, 2, 2, 3, 4, 5, 8, 8, 9, 17})),
        hidden(random_hidden(random)),
        shift(random.chance(0.7) ? 0 : random.between(1, 7)) {}

  int64_t slots() const { return tokens * choices; }
};

// Checks that two sums of `hidden` products in different orders agree up to rounding.
template <typename T>
double tolerance(int64_t hidden) {
  return static_cast<double>(hidden + 4) * std::numeric_limits<accumulate_t<T>>::epsilon();
}

// Checks |a - b| against a bound from the sum of the products' magnitudes.
template <typename T>
bool close_weights(const Buffer<accumulate_t<T>>& a, const Buffer<accumulate_t<T>>& b, const Buffer<T>& grad,
                   const Buffer<T>& y, const Buffer<int32_t>& slot, const Shape& shape,
                   const ExpertBiases& biases = {}) {
  for (int64_t i = 0; i < a.size(); ++i) {
    double magnitude = 0;
    const T* bias = biases.data != nullptr && slot[i] >= 0 ? bias_of_row<T>(biases, slot[i], shape.hidden) : nullptr;
    for (int64_t h = 0; h < shape.hidden && slot[i] >= 0; ++h) {
      const accumulate_t<T> added = bias != nullptr ? to_accumulate(bias[h]) : 0;
      magnitude += std::abs(static_cast<double>(to_accumulate(grad[i / shape.choices * shape.hidden + h])) *
                            static_cast<double>(to_accumulate(y[slot[i] * shape.hidden + h]) + added));
    }
    if (std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])) > tolerance<T>(shape.hidden) * magnitude) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("combine: the emulated kernel gives the CPU twin's bits") {
  for_cases("combine", 120, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Shape shape(random);
      Slots slots(random, shape.tokens, shape.choices, random.one_of({0.0, 0.3, 1.0}));
      const int64_t rows = slots.rows(random);
      Buffer<T> y(rows * shape.hidden, shape.shift);
      Buffer<accumulate_t<T>> weights(shape.slots());
      fill(y, random, random.one_of({0.0, 0.02}));
      fill(weights, random, random.one_of({0.0, 0.02}));
      Buffer<T> expected(shape.tokens * shape.hidden), out(shape.tokens * shape.hidden, shape.shift);
      const void* const given = random.chance(0.8) ? weights.data() : nullptr;
      const RandomBiases<T> biases(random, slots.used[0], shape.hidden, random.chance(0.8) ? shape.shift : 1);
      for (const ExpertBiases& added : {ExpertBiases{}, biases.of()}) {
        CombineArguments a{
            {y.data(), slots.slot.data(), given, shape.tokens, shape.choices, rows, shape.hidden, dtype_of<T>()},
            expected.data()};
        a.biases = added;
        cpu::combine(a);
        a.out = out.data();
        cuda::combine(a, nullptr);
        CHECK(same_values(out, expected));
        CHECK(out.intact());
      }
    });
  });
}

TEST_CASE("combine: tokens without choices are zero") {
  Buffer<float> out(3 * 5);
  cuda::combine({{nullptr, nullptr, nullptr, 3, 0, 0, 5, DType::kFloat32}, out.data()}, nullptr);
  for (const float value : out) CHECK(bit_cast<uint32_t>(value) == 0);
}

TEST_CASE("combine: a slot that points outside adds nothing") {
  for_cases("combine hostile", 40, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Shape shape(random);
      if (shape.tokens == 0) return;
      Slots slots(random, shape.tokens, shape.choices, 0.2);
      slots.spoil(random);
      Buffer<T> y(shape.slots() * shape.hidden, shape.shift);
      Buffer<accumulate_t<T>> weights(shape.slots());
      fill(y, random);
      fill(weights, random);
      Buffer<T> expected(shape.tokens * shape.hidden), out(shape.tokens * shape.hidden, shape.shift);
      CombineArguments a{{y.data(), slots.slot.data(), weights.data(), shape.tokens, shape.choices, shape.slots(),
                          shape.hidden, dtype_of<T>()},
                         out.data()};
      cuda::combine(a, nullptr);
      RandomBiases<T> biases(random, shape.slots(), shape.hidden, shape.shift);
      a.biases = biases.of();
      biases.spoil(random);
      Buffer<T> any(out.size(), shape.shift);
      a.out = any.data();
      cuda::combine(a, nullptr);  // reads and writes nothing outside
      CHECK(any.intact());
      a.biases = {};
      for (int32_t& slot : slots.slot) slot = slot < shape.slots() ? std::max(slot, -1) : -1;
      a.out = expected.data();
      cpu::combine(a);
      CHECK(same_values(out, expected));
      CHECK(out.intact());
    });
  });
}

TEST_CASE("combine_backward: the emulated kernel gives the CPU twin's dy, and dweights within rounding") {
  for_cases("combine_backward", 50, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Shape shape(random);
      Slots slots(random, shape.tokens, shape.choices, random.one_of({0.0, 0.3, 1.0}));
      const int64_t count = slots.rows(random), elements = count * shape.hidden;
      Buffer<T> grad(shape.tokens * shape.hidden, shape.shift), y(elements, shape.shift);
      Buffer<accumulate_t<T>> weights(shape.slots());
      fill(grad, random);
      fill(y, random);
      fill(weights, random, random.one_of({0.0, 0.1}));
      const bool rows = random.chance(0.8), sums = !rows || random.chance(0.8);
      Buffer<T> expected_dy(elements), dy(elements, shape.shift);
      Buffer<accumulate_t<T>> expected_dweights(shape.slots()), dweights(shape.slots()), again(shape.slots());
      CombineBackwardArguments a{{sums ? y.data() : nullptr, slots.slot.data(), rows ? weights.data() : nullptr,
                                  shape.tokens, shape.choices, count, shape.hidden, dtype_of<T>()},
                                 grad.data(),
                                 slots.used.data(),
                                 rows ? expected_dy.data() : nullptr,
                                 sums ? expected_dweights.data() : nullptr};
      const RandomBiases<T> biases(random, slots.used[0], shape.hidden, random.chance(0.8) ? shape.shift : 1);
      if (random.chance(0.5)) a.biases = biases.of();
      cpu::combine_backward(a);
      a.dy = rows ? dy.data() : nullptr;
      a.dweights = sums ? dweights.data() : nullptr;
      cuda::combine_backward(a, nullptr);
      CHECK(same_values(dy, expected_dy));
      CHECK(dy.intact());
      CHECK(dweights.intact());
      if (!sums) return;
      CHECK(close_weights(dweights, expected_dweights, grad, y, slots.slot, shape, a.biases));

      // The order of a sum must not depend on addresses, or on whether dy is computed.
      Buffer<T> moved(grad.size(), shape.shift + 1);
      std::copy(grad.begin(), grad.end(), moved.begin());
      a.grad = moved.data();
      a.dy = nullptr;
      a.dweights = again.data();
      cuda::combine_backward(a, nullptr);
      CHECK(again.same(dweights));
    });
  });
}

TEST_CASE("combine_backward: slots and a row count that point outside touch nothing outside") {
  for_cases("combine_backward hostile", 16, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Shape shape(random);
      if (shape.tokens == 0) return;
      Slots slots(random, shape.tokens, shape.choices, 0.2);
      slots.spoil(random);
      // Two choices that own one row would both write it, which the race detector reports: keep one owner per row.
      std::vector<bool> owned(static_cast<size_t>(shape.slots()));
      for (int32_t& slot : slots.slot) {
        if (slot < 0 || slot >= shape.slots()) continue;
        if (owned[slot])
          slot = INT32_MIN;
        else
          owned[slot] = true;
      }
      Buffer<T> grad(shape.tokens * shape.hidden, shape.shift), y(shape.slots() * shape.hidden, shape.shift);
      Buffer<accumulate_t<T>> weights(shape.slots()), dweights(shape.slots()), expected_dweights(shape.slots());
      fill(grad, random);
      fill(y, random);
      fill(weights, random);
      Buffer<T> dy(y.size(), shape.shift), expected_dy(y.size());
      CombineBackwardArguments a{{y.data(), slots.slot.data(), weights.data(), shape.tokens, shape.choices,
                                  shape.slots(), shape.hidden, dtype_of<T>()},
                                 grad.data(),
                                 slots.used.data(),
                                 dy.data(),
                                 dweights.data()};
      cuda::combine_backward(a, nullptr);
      RandomBiases<T> biases(random, shape.slots(), shape.hidden, shape.shift);
      biases.spoil(random);
      Buffer<accumulate_t<T>> any(shape.slots());
      CombineBackwardArguments b = a;
      b.biases = biases.of();
      b.dy = nullptr;
      b.dweights = any.data();
      cuda::combine_backward(b, nullptr);
      CHECK(any.intact());
      for (int32_t& slot : slots.slot) slot = slot < shape.slots() ? std::max(slot, -1) : -1;
      a.dy = expected_dy.data();
      a.dweights = expected_dweights.data();
      cpu::combine_backward(a);
      CHECK(same_values(dy, expected_dy));
      CHECK(dy.intact());
      CHECK(close_weights(dweights, expected_dweights, grad, y, slots.slot, shape));
      CHECK(dweights.intact());
    });
  });
}

namespace {

// The buffers have more rows than choices, so few elements are touched.
void check_far_row(int64_t choices) {
  constexpr int64_t kHidden = 1024, kTarget = (int64_t{1} << 31) / kHidden + 5, kRows = kTarget + 3;
  SparseMemory y(kRows * kHidden * 2), dy(kRows * kHidden * 2), out(kHidden * 2), grad(kHidden * 2);
  const auto elements = [](SparseMemory& memory) { return static_cast<BFloat16*>(memory.data()); };
  Buffer<int32_t> slot(choices), used(1);
  Buffer<float> weights(choices), dweights(choices);
  for (int32_t& value : slot) value = -1;
  slot[choices - 2] = static_cast<int32_t>(kTarget);
  for (float& weight : weights) weight = 1;
  used[0] = static_cast<int32_t>(kRows);
  weights[choices - 2] = 2;
  for (const int64_t column : {int64_t{5}, kHidden - 1}) {
    elements(y)[kTarget * kHidden + column] = round_to<BFloat16>(3);
    elements(grad)[column] = round_to<BFloat16>(7);
  }
  const CombineInput input{y.data(), slot.data(), weights.data(), 1, choices, kRows, kHidden, DType::kBFloat16};
  cuda::combine({input, out.data()}, nullptr);
  cuda::combine_backward({input, grad.data(), used.data(), dy.data(), dweights.data()}, nullptr);
  for (const int64_t column : {int64_t{5}, kHidden - 1}) {
    CHECK(to_accumulate(elements(out)[column]) == 6);
    CHECK(to_accumulate(elements(dy)[kTarget * kHidden + column]) == 14);
  }
  CHECK(dweights[choices - 2] == 42);
  CHECK(dweights[choices - 3] == 0);
}

}  // namespace

TEST_CASE("combine and its backward: rows past 2^31 elements") {
  for (const int64_t choices : {5, 68}) check_far_row(choices);
}
