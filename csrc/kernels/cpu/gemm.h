// Matrix products on one thread: C = A B (+ bias), the building block of grouped_linear.
//
// A is (m, k), B is (k, n), both with any strides; C is (m, n) with contiguous rows. fp64 sums in fp64, every other
// dtype in fp32, rounded once. The result of an element does not depend on m, n or where in C it lies: a caller may
// cut C into any tiles. The scheme is that of BLIS (Van Zee and van de Geijn, ACM TOMS 41-3, 2015):
//
//   gemm_micro_kernel.h   a tile of kTileRows x kTileColumns in registers, from packed panels
//   gemm_pack.h           panels from strided memory, widened to the type that sums are kept in
//   gemm_body.h           blocks of k, of rows and of columns that fit the caches, around those two
//
// The three are compiled once an instruction set: a file that calls gemm through PYMOE_SELECT_ISA names gemm_body.h as
// its PYMOE_ISA_BODY.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cpu/thread_buffer.h"

namespace pymoe::cpu {

template <typename T>
struct Gemm {
  const T* a;
  int64_t a_row_stride;
  int64_t a_column_stride;
  const T* b;
  int64_t b_row_stride;
  int64_t b_column_stride;
  const T* bias;  // (n,), added to every row of C; may be null
  int64_t bias_stride;
  T* c;
  int64_t c_row_stride;
  int64_t m;
  int64_t n;
  int64_t k;
};

// Blocks of C of this size repay the packing of their operands, which a caller who cuts C smaller does more often.
inline constexpr int64_t kGemmBlockRows = 768;
inline constexpr int64_t kGemmBlockColumns = 1024;

// The calling thread's panels.
inline ThreadBuffer& gemm_buffer() {
  thread_local ThreadBuffer buffer;
  return buffer;
}

}  // namespace pymoe::cpu
