// The tile registers of AMX, as gemm_amx.h and quantized_linear_amx.h use them: sums in tiles 0 to 3, left factors in
// tiles 4 and 5, right factors in tiles 6 and 7.
//
// A left tile is 16 rows of 32 bf16, or fewer rows; a right tile is 16 rows of 16 pairs, where row p holds elements 2 p
// and 2 p + 1 of 16 columns; a sum tile has as many rows as the left tile, of 16 floats. A product adds to every sum
//
//     (l[0] r[0] + l[2] r[2] + ... + l[30] r[30]) + (l[1] r[1] + l[3] r[3] + ... + l[31] r[31])
//
// with fused multiply-adds that begin at zero, in this order. Every operation rounds to nearest even, treats subnormal
// operands as zero and gives zero for subnormal results, whatever MXCSR says. tests/cpp/emulated_tiles.h does the same
// in plain C++, bit for bit.
//
// For products of bytes, a left tile is up to 16 rows of 64 signed bytes; a right tile is 16 rows of 16 groups of four
// unsigned bytes, where row p holds elements 4 p to 4 p + 3 of 16 columns; and the sums are 32-bit integers.
//
// The instructions are written as assembly, because gcc's intrinsics do not tell the compiler that tiles are read from
// memory and written to it. The assembler must support AMX (binutils 2.36, LLVM 11); the compiler needs no flag for it.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "kernels/cpu/isa.h"

#if PYMOE_MULTIVERSION
namespace pymoe::cpu {

// Configures the calling thread's tiles, and releases them when destroyed, so that thread switches need not save them.
class AmxTiles {
 public:
  explicit AmxTiles(int64_t left_rows) {
    alignas(64) uint8_t palette[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      palette[16 + 2 * tile] = 64;  // bytes in a row
      palette[48 + tile] = static_cast<uint8_t>(tile < 6 ? left_rows : 16);
    }
    asm volatile("ldtilecfg %0" ::"m"(palette) : "memory");
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }

  template <int kTile>
  PYMOE_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  PYMOE_INLINE void load(const void* rows, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(row_bytes), "i"(kTile) : "memory");
  }
  template <int kTile>
  PYMOE_INLINE void store(void* rows, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(row_bytes), "i"(kTile) : "memory");
  }
  template <int kSum, int kLeft, int kRight>
  PYMOE_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
  template <int kSum, int kLeft, int kRight>
  PYMOE_INLINE void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

}  // namespace pymoe::cpu
#endif
