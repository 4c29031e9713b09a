// The arithmetic of expert_activation on one element, as one fixed sequence of IEEE operations, so that results do not
// depend on a library's functions or on the device. The exceptions are gelu and geglu in fp64, which use the library's
// erfc.
// Compile without contraction of a * b + c.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/macros.h"
#include "core/score.h"

namespace pymoe {

enum class Activation : int8_t {
  kSwiglu,
  kGelu,
  kRelu,
  kGeglu,
  kGegluTanh,
  kGeluTanh,
  kReluSquared,
  kClampedSwiglu,
};

// Returns true if the kind takes two values, gate and up, for each result.
constexpr bool is_gated(Activation kind) {
  return kind == Activation::kSwiglu || kind == Activation::kGeglu || kind == Activation::kGegluTanh ||
         kind == Activation::kClampedSwiglu;
}

// The parameters of kClampedSwiglu; the other kinds have none.
template <typename S>
struct SwigluClamp {
  S limit, alpha, up_offset;
};

// Returns 1 + e^x, with the bits of exp_in_fixed_steps(x) + 1 for every x except NaN, for which it returns 1. The
// function needs fewer steps than exp_in_fixed_steps, because bits of e^x that are lost in the sum do not matter: it
// handles neither subnormals nor NaN.
template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S one_plus_exp(S x) {
  using Steps = ExpSteps<S>;
  using Integer = typename Steps::Integer;
  constexpr S kLow = sizeof(S) == 4 ? S(-86) : S(-700);  // 2^n and 2^(n - 1) are normal numbers
  S clamped = x > kLow ? x : kLow;
  clamped = clamped < Steps::kHigh ? clamped : Steps::kHigh;
  const S shifted = clamped * Steps::kLog2E + Steps::kMagic;
  const S n = shifted - Steps::kMagic;
  const S r = add_exact_product(-n, Steps::kLn2High, clamped) - n * Steps::kLn2Low;
  S p = Steps::polynomial(0);
  for (int i = 1; i < Steps::kTerms; ++i) p = p * r + Steps::polynomial(i);
  const S twice = add_exact_product(p * (r * r) + r, S{2}, S{2});
  // The lowest bits of `shifted` are n; shifting drops the other bits. The product below is that of 2 e^r and half of
  // 2^n, because 2^n would overflow for the greatest x although the result does not.
  using Unsigned = std::make_unsigned_t<Integer>;
  const Unsigned exponent = (bit_cast<Unsigned>(shifted) + static_cast<Unsigned>(Steps::kBias - 1)) << Steps::kMantissa;
  return add_exact_product(twice, bit_cast<S>(exponent), S{1});
}

// The constants of fp32's normal_cdf: for z = |x| / sqrt 2 and t = 1 / (1 + 0.3 z), 1 - Phi(|x|) = e^(-z^2) t P(t). P
// is a minimax fit (relative error 2e-8, or 4.4e-8 with the coefficients in fp32, for 0 <= z <= 10.5; beyond that the
// result underflows), so the lower tail keeps its relative accuracy, which 1 + erf would lose.
struct NormalTail {
  static constexpr float kSlope = 0.212132034f;  // 0.3 / sqrt 2
  static constexpr float kP0 = 0.0845937263f, kP1 = 0.0853616191f, kP2 = 0.0741449206f, kP3 = 0.107547398f;
  static constexpr float kP4 = -0.0475009843f, kP5 = 0.27408818f, kP6 = -0.25632001f, kP7 = 0.242861843f;
  static constexpr float kP8 = -0.0647767023f;
};

// The constants of gelu_tanh: 2 u = x (kLinear + kCubic x^2) for u = sqrt(2 / pi) (x + 0.044715 x^3). Past kSaturated
// e^(-2 |u|) is 0 even in fp64; up to there x^2 does not overflow.
struct GeluTanh {
  static constexpr double kLinear = 1.5957691216057308, kCubic = 0.071354816272600254, kSaturated = 40.0;
};

inline constexpr double kInverseSqrt2Pi = 0.39894228040143268, kMinusInverseSqrt2 = -0.70710678118654752;

template <typename S>
using element_t = S;

// Does the same as normal_cdf of core/activation_steps.h, in fp64 and with the library's erfc.
PYMOE_HOST_DEVICE PYMOE_INLINE double normal_cdf(double x, double& gauss) {
  gauss = exp_in_fixed_steps(x * x * -0.5);
  return 0.5 * erfc(x * kMinusInverseSqrt2);
}

#include "core/activation_steps.h"

}  // namespace pymoe
