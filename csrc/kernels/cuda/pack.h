// Pack: several elements that move through memory as one access of 1, 2, 4, 8 or 16 bytes.
#pragma once

#include <cstdint>
#include <initializer_list>

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

// The machine word of an access of so many bytes.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = unsigned char;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};
template <typename T>
using word_of = typename WordOf<static_cast<int>(sizeof(T))>::type;

// `from` and `to` must be aligned to the size of the pack. The streaming forms are for bytes that are used once: they
// leave the caches first.
template <typename P, typename T>
PYMOE_DEVICE P load_pack(const T* from) {
  return bit_cast<P>(*reinterpret_cast<const word_of<P>*>(from));
}

template <typename P, typename T>
PYMOE_DEVICE P load_pack_streaming(const T* from) {
  return bit_cast<P>(__ldcs(reinterpret_cast<const word_of<P>*>(from)));
}

template <typename P, typename T>
PYMOE_DEVICE void store_pack(T* to, const P& pack) {
  *reinterpret_cast<word_of<P>*>(to) = bit_cast<word_of<P>>(pack);
}

template <typename P, typename T>
PYMOE_DEVICE void store_pack_streaming(T* to, const P& pack) {
  __stcs(reinterpret_cast<word_of<P>*>(to), bit_cast<word_of<P>>(pack));
}

// The greatest of 16, 8, 4, 2, 1 that divides all addresses and `row_bytes`: the widest access to rows of that size.
inline int64_t widest_access(std::initializer_list<const void*> addresses, int64_t row_bytes) {
  auto all = static_cast<uintptr_t>(row_bytes) | uintptr_t{16};
  for (const void* address : addresses) all |= reinterpret_cast<uintptr_t>(address);
  return static_cast<int64_t>(all & (~all + 1));
}

}  // namespace pymoe::cuda
