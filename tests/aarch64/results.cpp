// Prints the instruction set in use, and then a line for every case of the kernels whose bits are the same on every
// processor: its name and a hash of the results. tests/aarch64/check.py compares the lines of x86-64 and aarch64.
//
// Products of grouped_linear are missing, because the order of their sums depends on the instruction set, and so are
// results that depend on the C library's functions: logarithms, and gelu in fp64. A NaN counts as any other: no kernel
// promises its sign and payload, and processors differ in them.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "dtype_of.h"
#include "kernels/combine.h"
#include "kernels/cpu/isa.h"
#include "kernels/expert_activation.h"
#include "kernels/gate_topk.h"
#include "kernels/quantized_linear.h"
#include "kernels/quantized_weight.h"
#include "kernels/router_losses.h"

using namespace pymoe;
using pymoe::test::dtype_of;

namespace {

// Returns the same numbers on every processor.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  uint32_t below(uint32_t limit) { return next() % limit; }
  // A value of either sign between 2^-8 and 2^3, or zero.
  float usual() {
    const auto step = static_cast<float>(1 << below(8)) / 2048.0f;
    return static_cast<float>(static_cast<int>(below(257)) - 128) * step + step / 256 * static_cast<float>(below(99));
  }
  float hostile() {
    constexpr uint32_t kBits[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x00000001, 0x80000000,
                                  0x00700000, 0x7f7fffff, 0xc2d00000, 0x42b20000, 0x33000000};
    return below(9) == 0 ? bit_cast<float>(kBits[below(10)]) : usual();
  }

 private:
  uint64_t state_;
};

template <typename T>
std::vector<T> values(Random& random, int64_t count, bool hostile = false) {
  std::vector<T> made(static_cast<size_t>(count));
  for (auto& value : made) {
    const float wide = hostile ? random.hostile() : random.usual();
    if constexpr (std::is_same_v<T, double>) {
      value = static_cast<double>(wide) * (1.0 + random.below(1000) / 4096.0 / 65536.0);
    } else {
      value = round_to<T>(wide);
    }
  }
  return made;
}

class Hash {
 public:
  template <typename T>
  Hash& add(const std::vector<T>& all) {
    for (T value : all) {
      if constexpr (std::is_floating_point_v<T>) {
        if (value != value) value = T{-1.0e30f};
      } else if constexpr (std::is_same_v<T, BFloat16>) {
        if ((value.bits & 0x7fffu) > 0x7f80u) value.bits = 0x7fc0u;
      } else if constexpr (std::is_same_v<T, Float16>) {
        if ((value.bits & 0x7fffu) > 0x7c00u) value.bits = 0x7e00u;
      }
      unsigned char bytes[sizeof(T)];
      std::memcpy(bytes, &value, sizeof(T));
      for (const unsigned char byte : bytes) state_ = (state_ ^ byte) * 1099511628211u;
    }
    return *this;
  }
  void print(const std::string& name) const { std::printf("%s: %016" PRIx64 "\n", name.c_str(), state_); }

 private:
  uint64_t state_ = 14695981039346656037u;
};

constexpr const char* kDTypes[] = {"fp32", "fp64", "bf16", "fp16"};

template <typename T>
std::string name_of() {
  return kDTypes[static_cast<int>(dtype_of<T>())];
}

// --- quantised weights ---

struct Format {
  WeightFormat format;
  const char* name;
};
constexpr Format kFormats[] = {{WeightFormat::kInt8, "int8"},       {WeightFormat::kInt4, "int4"},
                               {WeightFormat::kMxfp4, "mxfp4"},     {WeightFormat::kFp8, "fp8"},
                               {WeightFormat::kAffine8, "affine8"}, {WeightFormat::kAffine4, "affine4"},
                               {WeightFormat::kAffine2, "affine2"}, {WeightFormat::kSymmetric8, "symmetric8"}};

constexpr bool is_made_by_quantize_weight(WeightFormat format) {
  return !is_affine(format) && format != WeightFormat::kSymmetric8;
}

// The tiles of one expert: quantised random weights, or random codes with random scales.
std::vector<uint8_t> packed_weight(Random& random, WeightFormat format, int64_t outputs, int64_t inputs) {
  const int64_t tile_bytes = quantized_tile_bytes(format, inputs);
  std::vector<uint8_t> packed(static_cast<size_t>(quantized_tiles(outputs) * tile_bytes));
  if (is_made_by_quantize_weight(format)) {
    const auto weight = values<float>(random, outputs * inputs);
    cpu::quantize_weight(
        {weight.data(), {outputs * inputs, inputs, 1}, packed.data(), 1, outputs, inputs, format, DType::kFloat32});
    return packed;
  }
  for (auto& byte : packed) byte = static_cast<uint8_t>(random.next());
  const int64_t head = fused_head_bytes(format), run = fused_run_bytes(format);
  for (int64_t tile = 0; tile < quantized_tiles(outputs); ++tile) {
    for (int64_t begin = tile * tile_bytes; begin < (tile + 1) * tile_bytes; begin += run) {
      const auto scales = values<float>(random, head / 4);
      std::memcpy(packed.data() + begin, scales.data(), static_cast<size_t>(head));
    }
  }
  return packed;
}

template <typename T>
void quantized_products(const Format& format) {
  Random random(11);
  for (const int64_t inputs : {32, 200, 512, 1100}) {
    for (const int64_t outputs : {64, 70}) {
      const auto packed = packed_weight(random, format.format, outputs, inputs);
      for (const int64_t rows : {1, 2, 3, 4, 5, 6, 13, 29}) {
        const bool hostile = rows == 5;
        const auto x = values<T>(random, rows * inputs, hostile), bias = values<T>(random, outputs);
        const int32_t offsets[] = {0, static_cast<int32_t>(rows)};
        std::vector<T> y(static_cast<size_t>(rows * outputs));
        std::vector<char> workspace(static_cast<size_t>(quantized_linear_workspace(rows, inputs, format.format) + 64));
        cpu::quantized_linear({x.data(), packed.data(), offsets, rows % 2 == 0 ? bias.data() : nullptr, y.data(), rows,
                               inputs, outputs, 1, format.format, dtype_of<T>(), workspace.data()});
        Hash().add(y).print("quantized_linear " + std::string(format.name) + " " + name_of<T>() + " rows " +
                            std::to_string(rows) + " inputs " + std::to_string(inputs) + " outputs " +
                            std::to_string(outputs));
      }
    }
  }
}

void quantized_weights(const Format& format) {
  Random random(12);
  for (const int64_t inputs : {1, 33, 320}) {
    Hash()
        .add(packed_weight(random, format.format, 130, inputs))
        .print("quantize_weight " + std::string(format.name) + " inputs " + std::to_string(inputs));
  }
}

// --- the other kernels ---

template <typename T>
void activations() {
  Random random(21);
  constexpr int64_t kRows = 9, kFeatures = 77;
  for (int kind = 0; kind <= static_cast<int>(Activation::kClampedSwiglu); ++kind) {
    const auto activation = static_cast<Activation>(kind);
    if (std::is_same_v<T, double> && (activation == Activation::kGelu || activation == Activation::kGeglu)) continue;
    const int64_t width = is_gated(activation) ? 2 * kFeatures : kFeatures;
    const auto h = values<T>(random, kRows * width, true), grad = values<T>(random, kRows * kFeatures);
    std::vector<T> out(static_cast<size_t>(kRows * kFeatures)), grad_h(static_cast<size_t>(kRows * width));
    const SwigluClamp<double> clamp{7.0, 1.702, 1.0};
    cpu::expert_activation({nullptr, h.data(), out.data(), kRows, kFeatures, activation, dtype_of<T>(), clamp});
    cpu::expert_activation_backward(
        {grad.data(), h.data(), grad_h.data(), kRows, kFeatures, activation, dtype_of<T>(), clamp});
    Hash().add(out).print("expert_activation " + std::to_string(kind) + " " + name_of<T>());
    Hash().add(grad_h).print("expert_activation_backward " + std::to_string(kind) + " " + name_of<T>());
  }
}

template <typename T>
void gates() {
  using S = accumulate_t<T>;
  Random random(31);
  for (const int64_t experts : {5, 64, 131}) {
    for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
      for (const bool biased : {false, true}) {
        constexpr int64_t kTokens = 37, kChoices = 4;
        const auto logits = values<T>(random, kTokens * experts, experts == 64);
        const auto bias = values<S>(random, experts);
        std::vector<S> weights(kTokens * kChoices);
        std::vector<int32_t> chosen(kTokens * kChoices), load(static_cast<size_t>(experts));
        const GateOptions options{score, true, 1.5};
        const std::string name = "gate " + name_of<T>() + " experts " + std::to_string(experts) + " score " +
                                 std::to_string(static_cast<int>(score)) + " bias " + std::to_string(biased);
        cpu::gate_topk({dtype_of<T>(), logits.data(), biased ? bias.data() : nullptr, weights.data(), chosen.data(),
                        load.data(), kTokens, experts, kChoices, 0, 0, options});
        Hash().add(weights).add(chosen).add(load).print(name);
        const auto grad = values<S>(random, kTokens * kChoices);
        std::vector<T> grad_logits(static_cast<size_t>(kTokens * experts));
        cpu::gate_topk_backward({dtype_of<T>(), logits.data(), chosen.data(), grad.data(), grad_logits.data(), kTokens,
                                 experts, kChoices, !biased, options});
        Hash().add(grad_logits).print(name + " backward");
        const S grad_balance = S{0.75f};
        std::vector<S> losses(2);
        std::vector<double> workspace(static_cast<size_t>(router_losses_workspace(kTokens)));
        const RouterLossesInput input{dtype_of<T>(), logits.data(), kTokens, experts, load.data(), false, false, score};
        cpu::router_losses({input, &losses[0], &losses[1], workspace.data()});
        cpu::router_losses_backward({input, &grad_balance, nullptr, grad_logits.data()});
        Hash().add(losses).add(grad_logits).print(name + " losses");
      }
    }
  }
}

template <typename T>
void combinations() {
  using S = accumulate_t<T>;
  Random random(41);
  constexpr int64_t kTokens = 11, kChoices = 3, kRows = 33;
  for (const int64_t hidden : {1, 70, 259}) {
    const auto y = values<T>(random, kRows * hidden), grad = values<T>(random, kTokens * hidden);
    const auto weights = values<S>(random, kTokens * kChoices);
    std::vector<int32_t> slot(kTokens * kChoices);
    for (size_t i = 0; i < slot.size(); ++i) slot[i] = i % 7 == 3 ? -1 : static_cast<int32_t>(i * 5 % kRows);
    std::vector<T> out(static_cast<size_t>(kTokens * hidden)), dy(static_cast<size_t>(kRows * hidden));
    std::vector<S> dweights(kTokens * kChoices);
    const CombineInput input{y.data(), slot.data(), weights.data(), kTokens, kChoices, kRows, hidden, dtype_of<T>()};
    const int32_t used = kRows;
    cpu::combine({input, out.data()});
    cpu::combine_backward({input, grad.data(), &used, dy.data(), dweights.data()});
    Hash().add(out).add(dy).add(dweights).print("combine " + name_of<T>() + " hidden " + std::to_string(hidden));
  }
}

}  // namespace

int main() {
  std::printf("%s\n", cpu::name_of(cpu::best_isa()));
  for (const Format& format : kFormats) {
    if (is_made_by_quantize_weight(format.format)) quantized_weights(format);
    quantized_products<float>(format);
    quantized_products<BFloat16>(format);
    quantized_products<Float16>(format);
  }
  const auto every_dtype = [](auto&& run) {
    run(TypeTag<float>{});
    run(TypeTag<double>{});
    run(TypeTag<BFloat16>{});
    run(TypeTag<Float16>{});
  };
  every_dtype([]<typename T>(TypeTag<T>) { activations<T>(); });
  every_dtype([]<typename T>(TypeTag<T>) { gates<T>(); });
  every_dtype([]<typename T>(TypeTag<T>) { combinations<T>(); });
  return 0;
}
