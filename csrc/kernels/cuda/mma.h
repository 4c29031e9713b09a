// The tensor cores' instructions for 16-bit floats, available on every GPU from sm_80 on. All 32 lanes of a warp must
// call them together. The layouts are those of "mma.m16n8k16" and "ldmatrix" in the PTX ISA.
//
//   load_matrices             four 8 x 8 matrices from shared memory: tile + offset of lane 8 i + r is row r of
//                             matrix i, 16 bytes at a 16-byte boundary. Lane 4 g + t gets to[i] = elements
//                             (g, 2 t), (g, 2 t + 1).
//   load_matrices_transposed  the same for the matrices' transposes: elements (2 t, g), (2 t + 1, g).
//   multiply_add              c (16 x 8) += a (16 x 16) * b (16 x 8), products exact, sums in fp32. Lane 4 g + t holds
//                             a: rows g, g + 8, g, g + 8 at columns 2 t, 2 t, 2 t + 8, 2 t + 8 and the one after;
//                             b: rows 2 t, 2 t + 8 and the one after, column g;
//                             c: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
//   store_16_bytes            one access to shared memory at a 16-byte boundary; compilers often split it into four.
// The result of load_matrices for a 16 x 16 block is `a` if it takes the quarters in the order (0, 0), (8, 0), (0, 8),
// (8, 8). For a block of b, as rows of columns, in the order (0, 0), (0, 8), (8, 0), (8, 8), it is b of columns 0 to 7
// in to[0], to[1] and of columns 8 to 15 in to[2], to[3].
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/platform.h"

#if defined(__CUDACC__)

namespace pymoe::cuda {

// Addresses in shared memory are computed as 32-bit sums, so that many offsets can share one base.
#define PYMOE_LOAD_MATRICES(name, modifier)                                                     \
  template <typename T>                                                                         \
  PYMOE_DEVICE void name(uint32_t(&to)[4], const T* tile, int offset) {                         \
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(tile));                \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                           \
                 : "r"(base + static_cast<uint32_t>(offset) * static_cast<uint32_t>(sizeof(T))) \
                 : "memory");                                                                   \
  }
PYMOE_LOAD_MATRICES(load_matrices, "")
PYMOE_LOAD_MATRICES(load_matrices_transposed, ".trans")
#undef PYMOE_LOAD_MATRICES

PYMOE_DEVICE void store_16_bytes(void* to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

#define PYMOE_MULTIPLY_ADD(Type, ptx_type)                                                                     \
  PYMOE_DEVICE void multiply_add(Type, float(&c)[4], const uint32_t(&a)[4], uint32_t b_low, uint32_t b_high) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ptx_type "." ptx_type                                         \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));                                \
  }
PYMOE_MULTIPLY_ADD(TypeTag<BFloat16>, "bf16")
PYMOE_MULTIPLY_ADD(TypeTag<Float16>, "f16")
#undef PYMOE_MULTIPLY_ADD

}  // namespace pymoe::cuda

#else

#include "cuda_on_cpu/mma.h"

#endif
