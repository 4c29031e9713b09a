// The kernels' element types: a tag, storage structs for 16-bit floats, and conversions that both twins (host and
// device) share.
//
// Widening is exact and rounding is to nearest even; NaN stays NaN (with any payload), infinities and signed zeros stay
// exact. A GPU has instructions for these conversions; elsewhere, integer operations do the same, and for subnormal
// fp16 numbers a multiplication or an addition in fp32.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/macros.h"

namespace pymoe {

enum class DType : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

PYMOE_HOST_DEVICE constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// The type in which sums over elements of T are kept: fp64 for fp64, else fp32.
template <typename T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From>
PYMOE_HOST_DEVICE PYMOE_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

PYMOE_HOST_DEVICE PYMOE_INLINE float to_accumulate(float value) { return value; }
PYMOE_HOST_DEVICE PYMOE_INLINE double to_accumulate(double value) { return value; }

PYMOE_HOST_DEVICE PYMOE_INLINE float to_accumulate(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

PYMOE_HOST_DEVICE PYMOE_INLINE float to_accumulate(Float16 value) {
#if defined(__CUDA_ARCH__)
  float widened_by_gpu;
  asm("cvt.f32.f16 %0, %1;" : "=f"(widened_by_gpu) : "h"(value.bits));
  return widened_by_gpu;
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN: widen the exponent, keep the payload
    return bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // fp32 represents every fp16 subnormal as a normal number. None of the operands is subnormal, so a thread that
  // flushes subnormals to zero gets the same result.
  const float widened = magnitude < 0x400u ? static_cast<float>(magnitude) * bit_cast<float>(0x33800000u)  // * 2^-24
                                           : bit_cast<float>((magnitude << 13) + 0x38000000u);
  return bit_cast<float>(sign | bit_cast<uint32_t>(widened));
#endif
}

// round_to<T>(value) returns the element of type T that is nearest to an accumulated value, ties to even.
template <typename T>
PYMOE_HOST_DEVICE PYMOE_INLINE T round_to(accumulate_t<T> value);

template <>
PYMOE_HOST_DEVICE PYMOE_INLINE float round_to<float>(float value) {
  return value;
}

template <>
PYMOE_HOST_DEVICE PYMOE_INLINE double round_to<double>(double value) {
  return value;
}

template <>
PYMOE_HOST_DEVICE PYMOE_INLINE BFloat16 round_to<BFloat16>(float value) {
#if defined(__CUDA_ARCH__)
  BFloat16 rounded_by_gpu;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded_by_gpu.bits) : "f"(value));
  return rounded_by_gpu;
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{0x7fc0u};  // NaN, as torch stores it
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
PYMOE_HOST_DEVICE PYMOE_INLINE Float16 round_to<Float16>(float value) {
#if defined(__CUDA_ARCH__)
  Float16 rounded_by_gpu;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded_by_gpu.bits) : "f"(value));
  return rounded_by_gpu;
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Float16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return Float16{static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and up
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal; adding 0.5 aligns the mantissa and rounds it
    const float aligned = bit_cast<float>(magnitude) + 0.5f;
    return Float16{static_cast<uint16_t>(sign | (bit_cast<uint32_t>(aligned) - 0x3f000000u))};
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + odd;
  return Float16{static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) for the C++ type T that stores elements of `dtype`.
template <typename F>
decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64: return f(TypeTag<double>{});
    case DType::kBFloat16: return f(TypeTag<BFloat16>{});
    case DType::kFloat16: return f(TypeTag<Float16>{});
    case DType::kFloat32: break;
  }
  return f(TypeTag<float>{});
}

}  // namespace pymoe
