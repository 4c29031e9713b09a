// A pack of sums, rounded to the elements that are stored: round_to of core/dtype.h, two elements of 16 bits by one
// instruction of the GPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/platform.h"

namespace pymoe::cuda {

#if defined(__CUDA_ARCH__)
// Two rounded elements in a word, the first in its lower half.
PYMOE_DEVICE uint32_t narrow_pair(TypeTag<BFloat16>, float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
PYMOE_DEVICE uint32_t narrow_pair(TypeTag<Float16>, float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
inline constexpr bool kNarrowsPairs = true;
#else
inline constexpr bool kNarrowsPairs = false;
#endif

// Rounds `values` to nearest even.
template <typename T, int kCount>
PYMOE_DEVICE Pack<T, kCount> narrow(const accumulate_t<T> (&values)[kCount]) {
  Pack<T, kCount> result;
  if constexpr (kNarrowsPairs && sizeof(T) == 2 && kCount % 2 == 0) {
    uint32_t pairs[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) pairs[i] = narrow_pair(TypeTag<T>{}, values[2 * i], values[2 * i + 1]);
    memcpy(&result, pairs, sizeof(result));
  } else {
    for (int i = 0; i < kCount; ++i) result[i] = round_to<T>(values[i]);
  }
  return result;
}

}  // namespace pymoe::cuda
