// expert_activation and grouped_linear: values, threads, guard bands.
#include <doctest/doctest.h>

#include <cmath>
#include <stdexcept>

#include "kernels/expert_activation.h"
#include "kernels/grouped_linear.h"
#include "same_on_threads.h"
#include "worst_error.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

template <typename T>
void check_activation(Activation kind, int64_t rows, int64_t features) {
  const int64_t width = is_gated(kind) ? 2 * features : features;
  const auto h = random_values<T>(rows * width, 1), grad = random_values<T>(rows * features, 2);
  const auto [out] =
      same_on_threads([&] { return std::tuple(Buffer<T>(rows * features)); },
                      [&](auto& result) {
                        cpu::expert_activation({nullptr, h.data(), result.data(), rows, features, kind, dtype_of<T>()});
                      });
  double worst = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < features; ++f) {
      const double x = to_accumulate(h[static_cast<size_t>(r * width + f)]);
      double expected = x > 0 ? x : 0;
      if (kind == Activation::kGelu) expected = x * std::erfc(-x / std::sqrt(2.0)) / 2;
      if (kind == Activation::kSwiglu) {
        expected = x / (1 + std::exp(-x)) * to_accumulate(h[static_cast<size_t>(r * width + features + f)]);
      }
      worst = larger(worst, std::fabs(to_accumulate(out[r * features + f]) - expected) / (1 + std::fabs(expected)));
    }
  }
  CHECK(worst < (sizeof(T) == 2 ? 1e-2 : 1e-5));
  same_on_threads(
      [&] { return std::tuple(Buffer<T>(rows * width)); },
      [&](auto& grad_h) {
        cpu::expert_activation_backward({grad.data(), h.data(), grad_h.data(), rows, features, kind, dtype_of<T>()});
      });
}

template <typename T>
void check_linear(std::vector<int32_t> offsets, int64_t rows, int64_t input, int64_t output, bool transposed = false) {
  const auto experts = static_cast<int64_t>(offsets.size()) - 1;
  const auto x = random_values<T>(rows * input, 1), weight = random_values<T>(experts * output * input, 2);
  const auto bias = random_values<T>(experts * output, 3), grad = random_values<T>(rows * output, 4);
  // Returns element (h, n) of an expert's weight, stored as (E, N, H) or as (E, H, N), in which n is contiguous.
  const MatrixView weight_view =
      transposed ? MatrixView{weight.data(), 1, output} : MatrixView{weight.data(), input, 1};
  const auto common = [&](auto& result) {
    return GroupedArguments{offsets.data(), result.data(), rows, input, output, experts, dtype_of<T>(), nullptr};
  };
  const auto [y] = same_on_threads(
      [&] { return std::tuple(Buffer<T>(rows * output)); },
      [&](auto& result) {
        cpu::grouped_linear(
            {common(result), {x.data(), input, 1}, weight_view, output * input, {bias.data(), output, 1}});
      });
  const double worst = worst_error(y, offsets, rows, output, [&](int64_t r, int64_t expert, int64_t n, auto add) {
    for (int64_t h = 0; h < input; ++h) {
      add(static_cast<double>(to_accumulate(x[static_cast<size_t>(r * input + h)])) *
          to_accumulate(weight[static_cast<size_t>(expert * output * input + n * weight_view.row_stride +
                                                   h * weight_view.column_stride)]));
    }
    return to_accumulate(bias[static_cast<size_t>(expert * output + n)]);
  });
  CHECK(worst < (sizeof(T) == 2 ? 1e-2 : sizeof(T) == 4 ? 2e-6 : 1e-14));
  same_on_threads(
      [&] { return std::tuple(Buffer<T>(experts * output * input), Buffer<T>(experts * output)); },
      [&](auto& weight_grad, auto& bias_grad) {
        cpu::grouped_linear_weight_grad({common(weight_grad), {grad.data(), output, 1}, {x.data(), input, 1}});
        cpu::grouped_linear_bias_grad({common(bias_grad), {grad.data(), output, 1}});
      });
}

// Checks that rows in a given order have the bits of sorted rows, whatever rows lie next to them.
template <typename T>
void check_order(std::vector<int32_t> offsets, int64_t rows, int64_t input, int64_t output, bool transposed = false) {
  const auto experts = static_cast<int64_t>(offsets.size()) - 1;
  const auto x = random_values<T>(rows * input, 1), weight = random_values<T>(experts * output * input, 2);
  const auto bias = random_values<T>(experts * output, 3), grad = random_values<T>(rows * output, 4);
  std::vector<int32_t> order(static_cast<size_t>(rows));
  for (size_t r = 0; r < order.size(); ++r) order[r] = static_cast<int32_t>((r * 101 + 5) % order.size());
  const auto sorted = [&](const auto* from, int64_t width) {
    std::vector<T> to(static_cast<size_t>(rows * width));
    for (size_t i = 0; i < to.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i);
      to[i] = from[order[static_cast<size_t>(at / width)] * width + at % width];
    }
    return to;
  };
  const auto sorted_x = sorted(x.data(), input), sorted_grad = sorted(grad.data(), output);
  const MatrixView weight_view =
      transposed ? MatrixView{weight.data(), 1, output} : MatrixView{weight.data(), input, 1};
  const auto results = [&](const std::vector<T>& from_x, const std::vector<T>& from_grad, const int32_t* by) {
    return same_on_threads(
        [&] {
          return std::tuple(Buffer<T>(rows * output), Buffer<T>(experts * output * input), Buffer<T>(experts * output));
        },
        [&](auto& y, auto& weight_grad, auto& bias_grad) {
          const auto common = [&](auto& result) {
            return GroupedArguments{offsets.data(), result.data(), rows,    input, output,
                                    experts,        dtype_of<T>(), nullptr, by};
          };
          cpu::grouped_linear(
              {common(y), {from_x.data(), input, 1}, weight_view, output * input, {bias.data(), output, 1}});
          cpu::grouped_linear_weight_grad(
              {common(weight_grad), {from_grad.data(), output, 1}, {from_x.data(), input, 1}});
          cpu::grouped_linear_bias_grad({common(bias_grad), {from_grad.data(), output, 1}});
        });
  };
  const auto [y, weight_grad, bias_grad] = results(x, grad, order.data());
  const auto [sorted_y, sorted_weight_grad, sorted_bias_grad] = results(sorted_x, sorted_grad, nullptr);
  const auto found = sorted(y.data(), output);
  CHECK(memcmp(found.data(), sorted_y.data(), found.size() * sizeof(T)) == 0);
  CHECK(weight_grad.same(sorted_weight_grad));
  CHECK(bias_grad.same(sorted_bias_grad));
}

}  // namespace

TEST_CASE("expert_activation, forward and backward") {
  for (const Activation kind : {Activation::kSwiglu, Activation::kGelu, Activation::kRelu}) {
    check_activation<float>(kind, 67, 33);
    check_activation<BFloat16>(kind, 40, 64);
    check_activation<double>(kind, 5, 7);
    check_activation<float>(kind, 0, 8);
  }
}

TEST_CASE("grouped_linear and its gradients, with empty experts and unused rows") {
  check_linear<float>({0, 10, 10, 70, 71}, 80, 37, 19);
  check_linear<BFloat16>({0, 0, 64, 100}, 100, 64, 32);
  check_linear<double>({0, 3, 9}, 9, 5, 3);
  check_linear<float>({0, 0, 0}, 0, 8, 8);
}

TEST_CASE("grouped_linear past one block of k, of rows and of columns, in every width of element") {
  check_linear<float>({0, 400}, 400, 1100, 50);
  check_linear<double>({0, 200}, 200, 600, 30);
  check_linear<Float16>({0, 30, 130}, 130, 700, 150);
  check_linear<float>({0, 5}, 5, 0, 4);
}

TEST_CASE("grouped_linear of few rows, with a weight that is contiguous along its inputs or along its outputs") {
  for (const bool transposed : {false, true}) {
    check_linear<float>({0, 1, 3, 6, 13, 27}, 27, 1101, 139, transposed);
    check_linear<BFloat16>({0, 1, 3, 7, 15, 29}, 29, 2103, 141, transposed);
    check_linear<Float16>({0, 4, 9, 20}, 20, 47, 131, transposed);
    check_linear<double>({0, 1, 12}, 12, 601, 70, transposed);
  }
}

TEST_CASE("grouped_linear of many rows, with a weight that is contiguous along its inputs") {
  check_linear<float>({0, 64, 200}, 200, 45, 70);
  check_linear<float>({0, 16, 51}, 51, 2061, 39);
  check_linear<BFloat16>({0, 65, 200}, 200, 45, 70);
  check_linear<BFloat16>({0, 17, 61}, 61, 2077, 39);
  check_linear<Float16>({0, 64, 133}, 133, 2061, 33);
}

TEST_CASE("grouped_linear of rows that an order gives") {
  for (const bool transposed : {false, true}) {
    check_order<float>({0, 1, 3, 3, 20, 90, 300}, 310, 210, 139, transposed);
    check_order<BFloat16>({0, 2, 9, 24, 94, 300}, 300, 435, 70, transposed);
    check_order<Float16>({0, 4, 9, 80}, 83, 47, 131, transposed);
    check_order<double>({0, 1, 12, 200}, 200, 601, 34, transposed);
  }
  check_order<float>({0, 400}, 400, 1100, 50, true);
  check_order<BFloat16>({0, 800, 800}, 801, 1, 1);
}

TEST_CASE("grouped_linear refuses orders that name no row, or one twice") {
  const auto x = random_values<float>(4 * 8, 1), weight = random_values<float>(4 * 8, 2);
  const std::vector<int32_t> offsets{0, 3};
  for (const std::vector<int32_t>& order : {std::vector<int32_t>{0, 4, 1, 2}, {0, 1, -1, 2}, {3, 1, 3, 2}}) {
    Buffer<float> y(4 * 4);
    CHECK_THROWS(cpu::grouped_linear({{offsets.data(), y.data(), 4, 8, 4, 1, DType::kFloat32, nullptr, order.data()},
                                      {x.data(), 8, 1},
                                      {weight.data(), 8, 1},
                                      32,
                                      {nullptr, 0, 0}}));
    CHECK(y.intact());
  }
}

TEST_CASE("grouped_linear refuses offsets that do not cut the rows") {
  const auto x = random_values<float>(10 * 8, 1), weight = random_values<float>(2 * 4 * 8, 2);
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{1, 5, 10}, {0, 6, 5}, {0, 5, 11}, {0, -1, 10}}) {
    Buffer<float> y(10 * 4);
    CHECK_THROWS(cpu::grouped_linear({{offsets.data(), y.data(), 10, 8, 4, 2, DType::kFloat32, nullptr},
                                      {x.data(), 8, 1},
                                      {weight.data(), 8, 1},
                                      32,
                                      {nullptr, 0, 0}}));
    CHECK(y.intact());
  }
}
