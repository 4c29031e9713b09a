// Scores of a router's logits, by one fixed sequence of IEEE operations, so that a choice by scores does
// not depend on a library's exp, on the instruction set or on the device. The specification is
// pymoe/reference/scores.py; kernels/cpu/simd.h computes the same steps on vectors. Build without contraction.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/macros.h"

namespace pymoe {

enum class Score : int8_t { kSoftmax, kSigmoid };

// Where scores are divided by the sum of a token's chosen scores, or of its sigmoid scores, this replaces a smaller
// sum.
inline constexpr double kScoreSumFloor = 1e-20;

// Sums over experts run in this many interleaved lanes: lane i adds values i, i + 16, i + 32, ... in turn; then lanes
// i and i + 8 are added, then i and i + 4, i + 2, i + 1.
inline constexpr int kSumLanes = 16;

// The constants of exp_in_fixed_steps: x = n ln 2 + r, |r| <= ln 2 / 2, e^r = 1 + r + r^2 * polynomial(r).
template <typename S>
struct ExpSteps;

template <>
struct ExpSteps<float> {
  using Integer = int32_t;
  static constexpr float kLow = -104.0f, kHigh = 89.0f;  // beyond these limits the result is 0 or infinity
  static constexpr float kMagic = 12582912.0f;           // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLog2E = 1.44269504088896341f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // high: 9 bits, so n times it is exact
  static constexpr int kBias = 127, kMantissa = 23;
  // The coefficients are those of Cephes' expf.
  static constexpr int kTerms = 6;
  // A function and not an array, because device code cannot address a static array of the host.
  PYMOE_HOST_DEVICE static constexpr float polynomial(int i) {
    constexpr float kCoefficients[kTerms] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                             4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    return kCoefficients[i];
  }
};

template <>
struct ExpSteps<double> {
  using Integer = int64_t;
  static constexpr double kLow = -746.0, kHigh = 710.0;
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2E = 1.44269504088896341;
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr int kBias = 1023, kMantissa = 52;
  // Taylor coefficients 1/13!, ..., 1/3!, 1/2!.
  static constexpr int kTerms = 12;
  PYMOE_HOST_DEVICE static constexpr double polynomial(int i) {
    constexpr double kCoefficients[kTerms] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                              1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                              1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
    return kCoefficients[i];
  }
};

// Returns a * b + c, for a and b whose product is exact. Then a fused multiply-add, one instruction on the GPU, gives
// the same bits as two operations.
template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S add_exact_product(S a, S b, S c) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(S) == sizeof(float)) return __fmaf_rn(a, b, c);
  if constexpr (sizeof(S) == sizeof(double)) return __fma_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns e^x within 2 ulp. NaN stays NaN; overflow gives infinity, underflow gradual subnormals and zero.
template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S exp_in_fixed_steps(S x) {
  using Steps = ExpSteps<S>;
  using Integer = typename Steps::Integer;
  S clamped = x < Steps::kLow ? Steps::kLow : x;  // a NaN compares false and passes through
  clamped = clamped > Steps::kHigh ? Steps::kHigh : clamped;
  const S n = (clamped * Steps::kLog2E + Steps::kMagic) - Steps::kMagic;
  const S r = add_exact_product(-n, Steps::kLn2High, clamped) - n * Steps::kLn2Low;
  S p = Steps::polynomial(0);
  for (int i = 1; i < Steps::kTerms; ++i) p = p * r + Steps::polynomial(i);
  p = (p * (r * r) + r) + S{1};
  // Multiply by 2^n in two steps, since n may lie outside the range of normal exponents.
  const Integer exponent = x == x ? static_cast<Integer>(n) : Integer{0};
  const Integer half = exponent >> 1;
  const S scale_a = bit_cast<S>((half + Steps::kBias) << Steps::kMantissa);
  const S scale_b = bit_cast<S>((exponent - half + Steps::kBias) << Steps::kMantissa);
  return (p * scale_a) * scale_b;
}

template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S sigmoid_in_fixed_steps(S x) {
  return S{1} / (exp_in_fixed_steps(-x) + S{1});
}

// Returns `sum`, or kScoreSumFloor if that is greater. NaN stays NaN.
template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S floored_sum(S sum) {
  return sum < static_cast<S>(kScoreSumFloor) ? static_cast<S>(kScoreSumFloor) : sum;
}

// Returns the sum of a token's `count` values, one per choice, in blocks so that the rounding error stays small for
// large K.
template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S sum_in_blocks(const S* values, int64_t count) {
  S total = 0;
  for (int64_t block = 0; block < count; block += kSumLanes) {
    S sum = 0;
    for (int64_t j = block; j < count && j < block + kSumLanes; ++j) sum += values[j];
    total += sum;
  }
  return total;
}

}  // namespace pymoe
