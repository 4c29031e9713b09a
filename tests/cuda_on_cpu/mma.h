// Emulates csrc/kernels/cuda/mma.h: the same collectives with the same layouts. Tensor cores add the products of one
// instruction in an undocumented order; here they are added one after another.
#pragma once

#include "cuda_on_cpu/device.h"

namespace pymoe::cuda {

inline uint32_t two_elements(const void* first, const void* second) {
  uint16_t low, high;
  memcpy(&low, first, sizeof(low));
  memcpy(&high, second, sizeof(high));
  return low | static_cast<uint32_t>(high) << 16;
}

template <typename T>
void load_matrices(uint32_t (&to)[4], const T* tile, int offset, PYMOE_SITE) {
  const auto all = emulator::exchange("ldmatrix", 0xffffffffu, tile + offset, PYMOE_HERE);
  const unsigned g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const T* from = all.values[8 * i + g];
    to[i] = two_elements(from + 2 * t, from + 2 * t + 1);
  }
}

template <typename T>
void load_matrices_transposed(uint32_t (&to)[4], const T* tile, int offset, PYMOE_SITE) {
  const auto all = emulator::exchange("ldmatrix.trans", 0xffffffffu, tile + offset, PYMOE_HERE);
  const unsigned g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (unsigned i = 0; i < 4; ++i)
    to[i] = two_elements(all.values[8 * i + 2 * t] + g, all.values[8 * i + 2 * t + 1] + g);
}

inline void store_16_bytes(void* to, uint4 value) { *static_cast<uint4*>(to) = value; }

template <typename T>
void multiply_add(TypeTag<T>, float (&c)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high, PYMOE_SITE) {
  struct Registers {
    uint32_t a[4], b[2];
  };
  const auto all =
      emulator::exchange("mma", 0xffffffffu, Registers{{a[0], a[1], a[2], a[3]}, {b_low, b_high}}, PYMOE_HERE);
  const auto half = [](uint32_t pair, unsigned which) {
    return to_accumulate(T{static_cast<uint16_t>(pair >> (16 * which))});
  };
  const unsigned g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned lower = i / 2, column = 2 * t + i % 2;  // row g + 8 * lower
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned late = k / 8, lane = k % 8 / 2;
      c[i] += half(all.values[4 * g + lane].a[lower + 2 * late], k % 2) *
              half(all.values[4 * column + lane].b[late], k % 2);
    }
  }
}

}  // namespace pymoe::cuda
