// Pack: several elements that move through memory as one access of 1, 2, 4, 8 or 16 bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "core/dtype.h"
#include "kernels/cuda/platform.h"

namespace pymoe::cuda {

template <typename T, int kCount>
struct Pack {
  static constexpr int kSize = kCount;
  T values[kCount];
  PYMOE_DEVICE T& operator[](int i) { return values[i]; }
  PYMOE_DEVICE const T& operator[](int i) const { return values[i]; }
};

// The number of elements in 16 bytes.
template <typename T>
inline constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
template <typename T>
using Chunk = Pack<T, kChunk<T>>;

// The unsigned integer type, or vector of these, that is used to access kBytes bytes at once.
template <int kBytes>
using word_of_bytes = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<
        kBytes == 8, uint2,
        std::conditional_t<kBytes == 4, unsigned int, std::conditional_t<kBytes == 2, unsigned short, unsigned char>>>>;
template <typename T>
using word_of = word_of_bytes<static_cast<int>(sizeof(T))>;

// Loads a pack from `from`, which must be aligned to the size of the pack. The streaming form is for bytes that are
// used only once: the caches evict them first.
template <typename P, typename T>
PYMOE_DEVICE P load_pack(const T* from) {
  return bit_cast<P>(*reinterpret_cast<const word_of<P>*>(from));
}

template <typename P, typename T>
PYMOE_DEVICE P load_pack_streaming(const T* from) {
  return bit_cast<P>(__ldcs(reinterpret_cast<const word_of<P>*>(from)));
}

// load_pack_if and load_pack_streaming_if load a pack if `there` is true; otherwise they return zeros without reading
// `from`. The choice is made once for the whole word, not for each element.
template <typename P, typename T>
PYMOE_DEVICE P load_pack_if(bool there, const T* from) {
  word_of<P> word{};
  if (there) word = *reinterpret_cast<const word_of<P>*>(from);
  return bit_cast<P>(word);
}

template <typename P, typename T>
PYMOE_DEVICE P load_pack_streaming_if(bool there, const T* from) {
  word_of<P> word{};
  if (there) word = __ldcs(reinterpret_cast<const word_of<P>*>(from));
  return bit_cast<P>(word);
}

template <typename Word>
PYMOE_DEVICE void store_word(Word* to, const Word& word) {
  *to = word;
}
#if defined(__CUDA_ARCH__)
// Stores a word with one instruction. A plain assignment may be split: ptxas made four 4-byte stores for words that
// were built from pairs.
PYMOE_DEVICE void store_word(uint4* to, const uint4& word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
#endif

// Stores a pack to global memory; `to` must be aligned to the size of the pack.
template <typename P, typename T>
PYMOE_DEVICE void store_pack(T* to, const P& pack) {
  store_word(reinterpret_cast<word_of<P>*>(to), bit_cast<word_of<P>>(pack));
}

// Writes the elements of a pack to `to`, in the type of their sums (to_accumulate of core/dtype.h). Two bfloat16 of a
// word are widened by a shift and a mask, one instruction each; if they were extracted first, they would cost two.
template <typename T, int kCount>
PYMOE_DEVICE void widen(const Pack<T, kCount>& pack, accumulate_t<T> (&to)[kCount]) {
  if constexpr (std::is_same_v<T, BFloat16> && kCount % 2 == 0) {
    uint32_t pairs[kCount / 2];
    memcpy(pairs, &pack, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      to[2 * i] = bit_cast<float>(pairs[i] << 16);
      to[2 * i + 1] = bit_cast<float>(pairs[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = to_accumulate(pack[i]);
  }
}

#if defined(__CUDA_ARCH__)
// Rounds two elements and packs them into a word, the first in its lower half.
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

// Rounds sums to nearest even (round_to of core/dtype.h), and returns them as a pack. On the GPU, one instruction
// rounds two elements of 16 bits.
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

// Returns the greatest of 16, 8, 4, 2, 1 that divides all addresses and `row_bytes`: the widest possible access to such
// rows.
inline int64_t widest_access(std::initializer_list<const void*> addresses, int64_t row_bytes) {
  auto all = static_cast<uintptr_t>(row_bytes) | uintptr_t{16};
  for (const void* address : addresses) all |= reinterpret_cast<uintptr_t>(address);
  return static_cast<int64_t>(all & (~all + 1));
}

}  // namespace pymoe::cuda
