// Defines the part of CUDA's device language that kernels use, for a host compiler: csrc/kernels/cuda/platform.h
// includes it if there is no nvcc. Semantics follow the CUDA C++ Programming Guide; emulator.h says what is modelled.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_on_cpu/emulator.h"

// --- the language ---

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define PYMOE_DEVICE inline

#define PYMOE_SHARED(Type, name, count) \
  static char name##_declaration;       \
  Type* const name = static_cast<Type*>(::pymoe::emulator::shared_memory(&name##_declaration, sizeof(Type) * (count)))
#define PYMOE_DYNAMIC_SHARED(Type, name) \
  Type* const name = static_cast<Type*>(::pymoe::emulator::dynamic_shared_memory())

#define threadIdx (::pymoe::emulator::thread_index())
#define blockIdx (::pymoe::emulator::block_index())
#define blockDim (::pymoe::emulator::block_size())
#define gridDim (::pymoe::emulator::grid_size())

// A collective records the source line of its call.
#define PYMOE_SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()
#define PYMOE_HERE \
  ::pymoe::emulator::Site { file, line }

// --- vectors ---

#define PYMOE_VECTOR(Name, Type, bytes)                            \
  struct alignas(bytes / 2) Name##2 { Type x, y; };                \
  struct alignas(bytes) Name##4 { Type x, y, z, w; };              \
  inline Name##2 make_##Name##2(Type x, Type y) { return {x, y}; } \
  inline Name##4 make_##Name##4(Type x, Type y, Type z, Type w) { return {x, y, z, w}; }
PYMOE_VECTOR(int, int, 16)
PYMOE_VECTOR(uint, unsigned, 16)
PYMOE_VECTOR(float, float, 16)
PYMOE_VECTOR(ushort, unsigned short, 8)
#undef PYMOE_VECTOR

// --- barriers and fences ---

inline void __syncthreads(PYMOE_SITE) { pymoe::emulator::block_barrier(false, PYMOE_HERE); }
inline int __syncthreads_count(int predicate, PYMOE_SITE) {
  return pymoe::emulator::block_barrier(predicate != 0, PYMOE_HERE);
}
inline int __syncthreads_or(int predicate, PYMOE_SITE) {
  return pymoe::emulator::block_barrier(predicate != 0, PYMOE_HERE) > 0;
}
inline int __syncthreads_and(int predicate, PYMOE_SITE) {
  return pymoe::emulator::block_barrier(predicate == 0, PYMOE_HERE) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, PYMOE_SITE) {
  pymoe::emulator::warp_exchange("__syncwarp", mask, nullptr, nullptr, 0, true, PYMOE_HERE);
}
inline void __threadfence() { pymoe::emulator::fence(); }
inline void __threadfence_block() { pymoe::emulator::fence(); }
inline void __nanosleep(unsigned) { pymoe::emulator::pause(); }

// --- warp collectives ---

namespace pymoe::emulator {

// The values of all lanes; lanes outside the mask have none.
template <typename T>
struct Brought {
  T values[kWarpSize];
};

template <typename T>
Brought<T> exchange(const char* name, unsigned mask, const T& mine, Site site) {
  static_assert(sizeof(T) <= kMostExchanged);
  Brought<T> all{};
  warp_exchange(name, mask, &mine, all.values, sizeof(T), false, site);
  return all;
}

// The value of lane `source`, or the lane's own value if there is no such lane.
template <typename T>
T shuffle(const char* name, unsigned mask, const T& mine, unsigned source, Site site) {
  const Brought<T> all = exchange(name, mask, mine, site);
  return source < kWarpSize && (mask >> source & 1u) != 0 ? all.values[source] : mine;
}

template <typename T, typename F>
T reduce(const char* name, unsigned mask, T mine, F combine, Site site) {
  const Brought<T> all = exchange(name, mask, mine, site);
  bool first = true;
  T result{};
  for (int i = 0; i < kWarpSize; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    result = first ? all.values[i] : static_cast<T>(combine(result, all.values[i]));
    first = false;
  }
  return result;
}

}  // namespace pymoe::emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, PYMOE_SITE) {
  const unsigned lane = pymoe::emulator::lane(), segment = lane & ~(static_cast<unsigned>(width) - 1);
  return pymoe::emulator::shuffle("__shfl_sync", mask, value,
                                  segment + (static_cast<unsigned>(source) & (static_cast<unsigned>(width) - 1)),
                                  PYMOE_HERE);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, PYMOE_SITE) {
  const unsigned lane = pymoe::emulator::lane(), other = lane ^ static_cast<unsigned>(lane_mask);
  // A lane of a later segment cannot be read; a lane of an earlier segment can.
  const bool reach = other < ((lane & ~(static_cast<unsigned>(width) - 1)) + static_cast<unsigned>(width));
  return pymoe::emulator::shuffle("__shfl_xor_sync", mask, value, reach ? other : lane, PYMOE_HERE);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, PYMOE_SITE) {
  const unsigned lane = pymoe::emulator::lane(),
                 end = (lane & ~(static_cast<unsigned>(width) - 1)) + static_cast<unsigned>(width);
  return pymoe::emulator::shuffle("__shfl_down_sync", mask, value, lane + delta < end ? lane + delta : lane,
                                  PYMOE_HERE);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, PYMOE_SITE) {
  const unsigned lane = pymoe::emulator::lane(), begin = lane & ~(static_cast<unsigned>(width) - 1);
  return pymoe::emulator::shuffle("__shfl_up_sync", mask, value, lane >= begin + delta ? lane - delta : lane,
                                  PYMOE_HERE);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, PYMOE_SITE) {
  const unsigned mine = predicate != 0 ? 1u << pymoe::emulator::lane() : 0u;
  return pymoe::emulator::reduce("__ballot_sync", mask, mine, [](unsigned a, unsigned b) { return a | b; }, PYMOE_HERE);
}
inline int __any_sync(unsigned mask, int predicate, PYMOE_SITE) {
  return pymoe::emulator::reduce(
      "__any_sync", mask, predicate != 0 ? 1 : 0, [](int a, int b) { return a | b; }, PYMOE_HERE);
}
inline int __all_sync(unsigned mask, int predicate, PYMOE_SITE) {
  return pymoe::emulator::reduce(
      "__all_sync", mask, predicate != 0 ? 1 : 0, [](int a, int b) { return a & b; }, PYMOE_HERE);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, PYMOE_SITE) {
  const auto all = pymoe::emulator::exchange("__match_any_sync", mask, value, PYMOE_HERE);
  unsigned same = 0;
  for (int i = 0; i < pymoe::emulator::kWarpSize; ++i) {
    if ((mask >> i & 1u) != 0 && all.values[i] == value) same |= 1u << i;
  }
  return same;
}

#define PYMOE_REDUCE(name, Type, expression)                                                                   \
  inline Type name(unsigned mask, Type value, PYMOE_SITE) {                                                    \
    return pymoe::emulator::reduce(#name, mask, value, [](Type a, Type b) { return expression; }, PYMOE_HERE); \
  }
PYMOE_REDUCE(__reduce_max_sync, int, a > b ? a : b)
PYMOE_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
PYMOE_REDUCE(__reduce_min_sync, int, a < b ? a : b)
PYMOE_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
PYMOE_REDUCE(__reduce_add_sync, unsigned, a + b)
PYMOE_REDUCE(__reduce_or_sync, unsigned, a | b)
PYMOE_REDUCE(__reduce_and_sync, unsigned, a& b)
inline int __reduce_add_sync(unsigned mask, int value, PYMOE_SITE) {
  return static_cast<int>(__reduce_add_sync(mask, static_cast<unsigned>(value), line, file));
}
#undef PYMOE_REDUCE

// --- atomics: relaxed, like CUDA's; only for integers, since float atomics make results depend on the order ---

namespace pymoe::emulator {

template <typename T, typename F>
T atomic_update(T* address, F update) {
  maybe_pause();
  T before = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &before, update(before), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}

}  // namespace pymoe::emulator

#define PYMOE_ATOMICS(Type)                                                                        \
  inline Type atomicAdd(Type* p, Type v) {                                                         \
    pymoe::emulator::maybe_pause();                                                                \
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);                                             \
  }                                                                                                \
  inline Type atomicOr(Type* p, Type v) {                                                          \
    pymoe::emulator::maybe_pause();                                                                \
    return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);                                              \
  }                                                                                                \
  inline Type atomicExch(Type* p, Type v) {                                                        \
    pymoe::emulator::maybe_pause();                                                                \
    return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);                                            \
  }                                                                                                \
  inline Type atomicMax(Type* p, Type v) {                                                         \
    return pymoe::emulator::atomic_update(p, [v](Type old) { return old > v ? old : v; });         \
  }                                                                                                \
  inline Type atomicMin(Type* p, Type v) {                                                         \
    return pymoe::emulator::atomic_update(p, [v](Type old) { return old < v ? old : v; });         \
  }                                                                                                \
  inline Type atomicCAS(Type* p, Type expected, Type v) {                                          \
    return pymoe::emulator::atomic_update(p, [=](Type old) { return old == expected ? v : old; }); \
  }
PYMOE_ATOMICS(int)
PYMOE_ATOMICS(unsigned)
PYMOE_ATOMICS(unsigned long long)
#undef PYMOE_ATOMICS

// --- memory accesses with a cache hint ---

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T v) {
  *p = v;
}
template <typename T>
void __stcg(T* p, T v) {
  *p = v;
}

// --- arithmetic ---

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1u) << (31 - i);
  return reversed;
}
template <typename T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
