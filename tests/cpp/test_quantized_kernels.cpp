// quantize_weight and quantized_linear: layout, values, threads, guard bands.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/quantized_linear.h"
#include "kernels/quantized_weight.h"
#include "same_on_threads.h"
#include "worst_error.h"

using namespace pymoe;
using namespace pymoe::test;
using enum WeightFormat;

namespace {

struct Sizes {
  int64_t experts;
  int64_t outputs;
  int64_t inputs;
};

template <typename T>
Buffer<uint8_t> packed(const std::vector<T>& weight, Sizes s, WeightFormat format) {
  const int64_t bytes = s.experts * quantized_tiles(s.outputs) * quantized_tile_bytes(format, s.inputs);
  auto [result] = same_on_threads([&] { return std::tuple(Buffer<uint8_t>(bytes, 1)); },
                                  [&](auto& out) {
                                    cpu::quantize_weight({weight.data(),
                                                          {s.outputs * s.inputs, s.inputs, 1},
                                                          out.data(),
                                                          s.experts,
                                                          s.outputs,
                                                          s.inputs,
                                                          format,
                                                          dtype_of<T>()});
                                  });
  return std::move(result);
}

// Returns weights in an affine or symmetric format with random codes, whose scales and offsets are all 0.5.
Buffer<uint8_t> stored_packed(Sizes s, WeightFormat format) {
  const int64_t tile_bytes = quantized_tile_bytes(format, s.inputs);
  Buffer<uint8_t> bytes(s.experts * quantized_tiles(s.outputs) * tile_bytes);
  const auto random = random_values<float>(bytes.size(), 4);
  for (int64_t i = 0; i < bytes.size(); ++i)
    bytes.data()[i] = static_cast<uint8_t>(500 * random[static_cast<size_t>(i)]);
  const std::vector<float> halves(static_cast<size_t>(fused_head_bytes(format)) / sizeof(float), 0.5f);
  for (int64_t tile = 0; tile < bytes.size(); tile += tile_bytes) {
    for (int64_t input = 0; input < s.inputs; input += fused_run(format)) {
      memcpy(bytes.data() + tile + fused_begin(format, input), halves.data(), halves.size() * sizeof(float));
    }
  }
  return bytes;
}

// Returns the weight that the bytes represent.
double weight_at(const Buffer<uint8_t>& bytes, Sizes s, WeightFormat format, int64_t expert, int64_t output,
                 int64_t input) {
  const int64_t lane = output % kQuantizedTile;
  const uint8_t* tile = bytes.data() + (expert * quantized_tiles(s.outputs) + output / kQuantizedTile) *
                                           quantized_tile_bytes(format, s.inputs);
  if (format == kInt8) {
    float scale;
    memcpy(&scale, tile + 4 * lane, sizeof(scale));
    const uint8_t code = tile[quantized_head_bytes(kInt8) + input / 4 * 4 * kQuantizedTile + lane * 4 + input % 4];
    return static_cast<double>(scale) * (code - 128);
  }
  if (format == kFp8) {
    const uint8_t* block = tile + fused_begin(kFp8, input);
    float scale;
    memcpy(&scale, block + 4 * lane, sizeof(scale));
    const int code = block[4 * kQuantizedTile + input % kFp8Block * kQuantizedTile + lane], exponent = code >> 3 & 15;
    const double size =
        exponent == 0 ? std::ldexp(code & 7, -9) : std::ldexp(8 + (code & 7), exponent - 10);  // no NaN is expected
    return (code < 128 ? size : -size) * static_cast<double>(scale);
  }
  if (is_fused(format)) {
    const int64_t in_run = input % fused_run(format);
    const uint8_t* codes = tile + fused_begin(format, input) + fused_head_bytes(format);
    const int64_t together = 8 / bits_of(format);
    const uint8_t byte = codes[in_run / together * kQuantizedTile + lane];
    if (format == kSymmetric8) return 0.5 * static_cast<int8_t>(byte);
    return 0.5 * (byte >> in_run % together * bits_of(format) & ((1 << bits_of(format)) - 1)) + 0.5;
  }
  const int64_t number = input / kQuantizedGroup;
  const uint8_t* super =
      tile + quantized_head_bytes(format) +
      number / kSuperGroups * (quantized_super_bytes(format) + kSuperGroups * quantized_group_bytes(format));
  const uint8_t* group = super + quantized_super_bytes(format) + number % kSuperGroups * quantized_group_bytes(format);
  const int64_t in_group = input % kQuantizedGroup;
  const uint8_t both =
      group[quantized_ends_bytes(format) + in_group / 8 * 4 * kQuantizedTile + lane * 4 + in_group % 4];
  const int code = in_group % 8 < 4 ? both & 15 : both >> 4;
  if (format == kMxfp4) {
    constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return std::ldexp(code < 8 ? kValues[code] : -kValues[code - 8], group[lane] - 127);
  }
  Float16 d, dmin;
  memcpy(&d, super + 2 * lane, sizeof(d));
  memcpy(&dmin, super + 2 * (kQuantizedTile + lane), sizeof(dmin));
  const auto field = [&](int64_t i) {
    int found = 0;
    for (int64_t bit = 6 * i; bit < 6 * i + 6; ++bit) {
      const uint8_t byte = super[4 * kQuantizedTile + bit / 32 * 4 * kQuantizedTile + 4 * lane + bit % 32 / 8];
      found |= (byte >> bit % 8 & 1) << (bit - 6 * i);
    }
    return found;
  };
  const double scale = static_cast<double>(to_accumulate(d)) * field(number % kSuperGroups);
  const double minimum = static_cast<double>(to_accumulate(dmin)) * field(kSuperGroups + number % kSuperGroups);
  return std::ldexp(scale * code - minimum, tile[lane] - 127);
}

template <typename T>
void check_weight(Sizes s, WeightFormat format) {
  const auto weight = random_values<T>(s.experts * s.outputs * s.inputs, 1);
  const auto bytes = packed(weight, s, format);
  double worst = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(weight.size()); ++i) {
    const double came_back =
        weight_at(bytes, s, format, i / (s.outputs * s.inputs), i / s.inputs % s.outputs, i % s.inputs);
    worst = larger(worst, std::fabs(came_back - to_accumulate(weight[static_cast<size_t>(i)])));
  }
  CHECK(worst <= (format == kInt8   ? 4.0 / 127 / 2 * 1.01
                  : format == kInt4 ? 10.0 / 15
                  : format == kFp8  ? 4.0 / 16 * 1.01
                                    : 1.0));  // weights lie in [-4, 4]
}

template <typename T>
void check_linear(std::vector<int32_t> offsets, int64_t rows, int64_t inputs, int64_t outputs, WeightFormat format) {
  const Sizes s{static_cast<int64_t>(offsets.size()) - 1, outputs, inputs};
  const auto x = random_values<T>(rows * inputs, 1), bias = random_values<T>(s.experts * outputs, 3);
  const auto bytes = packed(random_values<float>(s.experts * outputs * inputs, 2), s, format);
  const auto [y] =
      same_on_threads([&] { return std::tuple(Buffer<T>(rows * outputs)); },
                      [&](auto& out) {
                        Buffer<char> workspace(quantized_linear_workspace(rows, inputs, format));
                        cpu::quantized_linear({x.data(), bytes.data(), offsets.data(), bias.data(), out.data(), rows,
                                               inputs, outputs, s.experts, format, dtype_of<T>(), workspace.data()});
                        CHECK(workspace.intact());
                      });
  const double worst = worst_error(y, offsets, rows, outputs, [&](int64_t r, int64_t expert, int64_t n, auto add) {
    for (int64_t h = 0; h < inputs; ++h) {
      add(to_accumulate(x[static_cast<size_t>(r * inputs + h)]) * weight_at(bytes, s, format, expert, n, h));
    }
    return to_accumulate(bias[static_cast<size_t>(expert * outputs + n)]);
  });
  CHECK(worst < (sizeof(T) == 2 ? 1e-2 : 1e-4));
}

template <typename T>
void check_input_grad(std::vector<int32_t> offsets, int64_t rows, int64_t inputs, int64_t outputs,
                      WeightFormat format) {
  const Sizes s{static_cast<int64_t>(offsets.size()) - 1, outputs, inputs};
  auto grad = random_values<T>(rows * outputs, 1);
  for (int64_t i = offsets.back() * outputs; i < rows * outputs; ++i) grad[static_cast<size_t>(i)] = round_to<T>(NAN);
  const auto bytes = is_fused(format) && format != kFp8
                         ? stored_packed(s, format)
                         : packed(random_values<float>(s.experts * outputs * inputs, 2), s, format);
  const auto [dx] =
      same_on_threads([&] { return std::tuple(Buffer<T>(rows * inputs)); },
                      [&](auto& out) {
                        cpu::quantized_linear_input_grad({grad.data(), bytes.data(), offsets.data(), out.data(), rows,
                                                          inputs, outputs, s.experts, format, dtype_of<T>()});
                      });
  const double worst = worst_error(dx, offsets, rows, inputs, [&](int64_t r, int64_t expert, int64_t h, auto add) {
    for (int64_t n = 0; n < outputs; ++n) {
      add(to_accumulate(grad[static_cast<size_t>(r * outputs + n)]) * weight_at(bytes, s, format, expert, n, h));
    }
    return 0.0;
  });
  CHECK(worst < (sizeof(T) == 2 ? 1e-2 : 1e-5));
}

}  // namespace

TEST_CASE("quantize_weight: bytes that stand for the weights, the same on any number of threads") {
  for (const WeightFormat format : {kInt8, kInt4, kMxfp4, kFp8}) {
    check_weight<float>({2, 70, 45}, format);
    check_weight<double>({1, 1, 1}, format);
    check_weight<BFloat16>({3, 64, 128}, format);
    check_weight<Float16>({1, 130, 33}, format);
    check_weight<float>({1, 3, 0}, format);
    check_weight<float>({2, 0, 7}, format);
  }
}

TEST_CASE("quantize_weight refuses weights that are not finite") {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf(""), -2e30f}) {
    std::vector<float> weight(3 * 40, 1.0f);
    weight[57] = bad;
    for (const WeightFormat format : {kInt8, kInt4, kMxfp4, kFp8}) {
      Buffer<uint8_t> out(quantized_tile_bytes(format, 40));
      CHECK_THROWS_AS(
          cpu::quantize_weight({weight.data(), {120, 40, 1}, out.data(), 1, 3, 40, format, DType::kFloat32}),
          std::invalid_argument);
      CHECK(out.intact());
    }
  }
}

TEST_CASE("quantized_linear, with empty experts and unused rows") {
  for (const WeightFormat format : {kInt8, kInt4, kMxfp4, kFp8}) {
    check_linear<float>({0, 10, 10, 70, 71}, 80, 37, 19, format);
    check_linear<BFloat16>({0, 0, 64, 165}, 170, 130, 65, format);
    check_linear<Float16>({0, 3, 9}, 9, 260, 64, format);
    check_linear<float>({0, 0, 0}, 0, 8, 8, format);
    check_linear<float>({0, 2}, 3, 0, 5, format);
    check_linear<float>({0, 400}, 400, 33, 70, format);
  }
}

TEST_CASE("quantized_linear refuses offsets that do not cut the rows") {
  const auto x = random_values<float>(10 * 8, 1);
  const auto bytes = packed(random_values<float>(2 * 4 * 8, 2), {2, 4, 8}, kInt8);
  Buffer<char> workspace(quantized_linear_workspace(10, 8, kInt8));
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{1, 5, 10}, {0, 6, 5}, {0, 5, 11}, {0, -1, 10}}) {
    Buffer<float> y(10 * 4);
    CHECK_THROWS(cpu::quantized_linear({x.data(), bytes.data(), offsets.data(), nullptr, y.data(), 10, 8, 4, 2, kInt8,
                                        DType::kFloat32, workspace.data()}));
    CHECK(y.intact());
  }
}

TEST_CASE("quantized_linear_input_grad, with empty experts and unused rows") {
  for (const WeightFormat format : {kInt8, kInt4, kMxfp4, kFp8, kAffine8, kAffine4, kAffine2, kSymmetric8}) {
    check_input_grad<float>({0, 10, 10, 70, 71}, 80, 37, 19, format);
    check_input_grad<BFloat16>({0, 0, 64, 165}, 170, 130, 65, format);
    check_input_grad<Float16>({0, 3, 9}, 9, 290, 64, format);
    check_input_grad<float>({0, 0, 0}, 2, 8, 8, format);
    check_input_grad<float>({0, 2}, 3, 0, 5, format);
    check_input_grad<float>({0, 2}, 3, 5, 0, format);
    check_input_grad<BFloat16>({0, 1}, 1, 1, 1, format);
    check_input_grad<float>({0, 1}, 1, 70, 9000, format);  // wide rows: 32 inputs at a time
  }
}

TEST_CASE("quantized_linear_input_grad refuses offsets that do not cut the rows") {
  const auto grad = random_values<float>(10 * 4, 1);
  const auto bytes = packed(random_values<float>(2 * 4 * 8, 2), {2, 4, 8}, kInt8);
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{1, 5, 10}, {0, 6, 5}, {0, 5, 11}, {0, -1, 10}}) {
    Buffer<float> dx(10 * 8);
    CHECK_THROWS(cpu::quantized_linear_input_grad(
        {grad.data(), bytes.data(), offsets.data(), dx.data(), 10, 8, 4, 2, kInt8, DType::kFloat32}));
    CHECK(dx.intact());
  }
}
