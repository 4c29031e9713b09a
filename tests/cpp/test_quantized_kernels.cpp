// quantize_weight and quantized_linear: layout, values, threads, guard bands.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/quantized_linear.h"
#include "kernels/quantized_weight.h"
#include "same_on_threads.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

struct Sizes {
  int64_t experts;
  int64_t outputs;
  int64_t inputs;
};

template <typename T>
Buffer<uint8_t> packed(const std::vector<T>& weight, Sizes s, int64_t bits) {
  const int64_t bytes = s.experts * quantized_tiles(s.outputs) * quantized_tile_bytes(bits, s.inputs);
  auto [result] = same_on_threads([&] { return std::tuple(Buffer<uint8_t>(bytes, 1)); },
                                  [&](auto& out) {
                                    cpu::quantize_weight({weight.data(),
                                                          {s.outputs * s.inputs, s.inputs, 1},
                                                          out.data(),
                                                          s.experts,
                                                          s.outputs,
                                                          s.inputs,
                                                          bits,
                                                          dtype_of<T>()});
                                  });
  return std::move(result);
}

// The weight that the bytes stand for.
double weight_at(const Buffer<uint8_t>& bytes, Sizes s, int64_t bits, int64_t expert, int64_t output, int64_t input) {
  const int64_t lane = output % kQuantizedTile;
  const uint8_t* tile = bytes.data() + (expert * quantized_tiles(s.outputs) + output / kQuantizedTile) *
                                           quantized_tile_bytes(bits, s.inputs);
  if (bits == 8) {
    float scale;
    memcpy(&scale, tile + 4 * lane, sizeof(scale));
    const uint8_t code = tile[quantized_head_bytes(8) + input / 4 * 4 * kQuantizedTile + lane * 4 + input % 4];
    return static_cast<double>(scale) * (code - 128);
  }
  const uint8_t* group = tile + input / kQuantizedGroup * quantized_group_bytes(4);
  BFloat16 scale, minimum;
  memcpy(&scale, group + 2 * lane, sizeof(scale));
  memcpy(&minimum, group + 2 * (kQuantizedTile + lane), sizeof(minimum));
  const int64_t in_group = input % kQuantizedGroup;
  const uint8_t both = group[4 * kQuantizedTile + in_group / 8 * 4 * kQuantizedTile + lane * 4 + in_group % 4];
  const int code = in_group % 8 < 4 ? both & 15 : both >> 4;
  return static_cast<double>(to_accumulate(scale)) * code + to_accumulate(minimum);
}

template <typename T>
void check_weight(Sizes s, int64_t bits) {
  const auto weight = random_values<T>(s.experts * s.outputs * s.inputs, 1);
  const auto bytes = packed(weight, s, bits);
  double worst = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(weight.size()); ++i) {
    const double came_back =
        weight_at(bytes, s, bits, i / (s.outputs * s.inputs), i / s.inputs % s.outputs, i % s.inputs);
    worst = std::fmax(worst, std::fabs(came_back - to_accumulate(weight[static_cast<size_t>(i)])));
  }
  CHECK(worst < (bits == 8 ? 4.0 / 127 / 2 * 1.01 : 8.0 / 15));  // weights lie in [-4, 4]
}

template <typename T>
void check_linear(std::vector<int32_t> offsets, int64_t rows, int64_t inputs, int64_t outputs, int64_t bits) {
  const Sizes s{static_cast<int64_t>(offsets.size()) - 1, outputs, inputs};
  const auto x = random_values<T>(rows * inputs, 1), bias = random_values<T>(s.experts * outputs, 3);
  const auto bytes = packed(random_values<float>(s.experts * outputs * inputs, 2), s, bits);
  const auto [y] =
      same_on_threads([&] { return std::tuple(Buffer<T>(rows * outputs)); },
                      [&](auto& out) {
                        Buffer<char> workspace(quantized_linear_workspace(rows, inputs, bits));
                        cpu::quantized_linear({x.data(), bytes.data(), offsets.data(), bias.data(), out.data(), rows,
                                               inputs, outputs, s.experts, bits, dtype_of<T>(), workspace.data()});
                        CHECK(workspace.intact());
                      });
  double worst = 0;  // error over the sum of the terms' sizes
  int64_t expert = 0;
  for (int64_t r = 0; r < rows; ++r) {
    while (expert < s.experts && r >= offsets[static_cast<size_t>(expert + 1)]) ++expert;
    for (int64_t n = 0; n < outputs; ++n) {
      double expected = 0, size = 1;
      if (expert < s.experts) {
        expected = to_accumulate(bias[static_cast<size_t>(expert * outputs + n)]);
        for (int64_t h = 0; h < inputs; ++h) {
          const double term =
              to_accumulate(x[static_cast<size_t>(r * inputs + h)]) * weight_at(bytes, s, bits, expert, n, h);
          expected += term;
          size += std::fabs(term);
        }
      }
      worst = std::fmax(worst, std::fabs(to_accumulate(y[r * outputs + n]) - expected) / size);
    }
  }
  CHECK(worst < (sizeof(T) == 2 ? 1e-2 : 1e-4));
}

}  // namespace

TEST_CASE("quantize_weight: bytes that stand for the weights, the same on any number of threads") {
  for (const int64_t bits : {8, 4}) {
    check_weight<float>({2, 70, 45}, bits);
    check_weight<double>({1, 1, 1}, bits);
    check_weight<BFloat16>({3, 64, 128}, bits);
    check_weight<Float16>({1, 130, 33}, bits);
    check_weight<float>({1, 3, 0}, bits);
    check_weight<float>({2, 0, 7}, bits);
  }
}

TEST_CASE("quantize_weight refuses weights that are not finite") {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf(""), -2e30f}) {
    std::vector<float> weight(3 * 40, 1.0f);
    weight[57] = bad;
    for (const int64_t bits : {8, 4}) {
      Buffer<uint8_t> out(quantized_tile_bytes(bits, 40));
      CHECK_THROWS_AS(cpu::quantize_weight({weight.data(), {120, 40, 1}, out.data(), 1, 3, 40, bits, DType::kFloat32}),
                      std::invalid_argument);
      CHECK(out.intact());
    }
  }
}

TEST_CASE("quantized_linear, with empty experts and unused rows") {
  for (const int64_t bits : {8, 4}) {
    check_linear<float>({0, 10, 10, 70, 71}, 80, 37, 19, bits);
    check_linear<BFloat16>({0, 0, 64, 165}, 170, 130, 65, bits);
    check_linear<Float16>({0, 3, 9}, 9, 260, 64, bits);
    check_linear<float>({0, 0, 0}, 0, 8, 8, bits);
    check_linear<float>({0, 2}, 3, 0, 5, bits);
    check_linear<float>({0, 400}, 400, 33, 70, bits);
  }
}

TEST_CASE("quantized_linear refuses offsets that do not cut the rows") {
  const auto x = random_values<float>(10 * 8, 1);
  const auto bytes = packed(random_values<float>(2 * 4 * 8, 2), {2, 4, 8}, 8);
  Buffer<char> workspace(quantized_linear_workspace(10, 8, 8));
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{1, 5, 10}, {0, 6, 5}, {0, 5, 11}, {0, -1, 10}}) {
    Buffer<float> y(10 * 4);
    CHECK_THROWS(cpu::quantized_linear({x.data(), bytes.data(), offsets.data(), nullptr, y.data(), 10, 8, 4, 2, 8,
                                        DType::kFloat32, workspace.data()}));
    CHECK(y.intact());
  }
}
