// Matrix products on one thread: C = A B (+ bias), the building block of grouped_linear.
//
// A is (m, k), B is (k, n), both with any strides; C is (m, n) with contiguous rows. Sums are fp64 for fp64, and fp32
// for every other dtype, rounded once at the end. The order in which an element's products are added depends only on k
// and on which operands are contiguous along k, not on m, n or the element's position in C: a caller may cut C into any
// blocks. An index may give the order of the rows of A and C, or of the steps of k; the result has the same bits as for
// operands copied into that order.
//
//   gemm_nt.h             A and B contiguous along k: B is not packed, a sum is kept in the lanes of a vector
//   gemm_nt_packed.h      the same sums for many rows, from panels that keep a lane's elements together
//
// All other layouts use the scheme of BLIS (Van Zee and van de Geijn, ACM TOMS 41-3, 2015), or a simpler one for few
// rows:
//
//   gemm_micro_kernel.h   a tile of kTileRows x kTileColumns in registers, from packed panels
//   gemm_pack.h           packs strided memory into panels, widened to the type of the sums, or as pairs of bf16
//   gemm_in_place.h       few rows and a B whose rows are contiguous: B is read in place
//   gemm_body.h           chooses among all of these, and loops over blocks of k, rows and columns that fit the caches
//
// bf16 has a separate scheme if the instruction set is amx: gemm_amx.h, with gemm_amx_pack.h, gemm_amx_store.h,
// gemm_amx_few.h and the instructions in amx_tiles.h.
//
// All of these are compiled once per instruction set (those for AMX only in v4_bf16), in
// kernels/grouped_linear_cpu.cpp; other files call chosen_gemm.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <tuple>
#include <utility>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "core/dtype.h"
#include "core/macros.h"

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
  bool leaves_cache = false;  // true if C is not read soon: 16-bit results may bypass the caches

  // `rows` and `steps` are orders: row i of A and of C is stored as row rows[i], and step p of k as column steps[p] of
  // A and row steps[p] of B. A null pointer stands for the natural order. With `rows`, the rows of A must be
  // contiguous; with `steps`, the columns of A and the rows of B.
  const int32_t* rows = nullptr;
  const int32_t* steps = nullptr;
};

// Returns the gemm for elements of type T, compiled for the instruction set in use.
template <typename T>
auto chosen_gemm() -> void (*)(const Gemm<T>&);

// Returns element i of an order, or i if the order is null.
PYMOE_INLINE int64_t place_of(const int32_t* order, int64_t i) { return order == nullptr ? i : order[i]; }

// For a loop that begins at element i: order_from returns the order from there on, and move_to returns the offset to
// add to the data pointer. With an order the offset is 0, since the order's values count from the start of the data.
PYMOE_INLINE const int32_t* order_from(const int32_t* order, int64_t i) {
  return order == nullptr ? nullptr : order + i;
}
PYMOE_INLINE int64_t move_to(const int32_t* order, int64_t i, int64_t stride) {
  return order == nullptr ? i * stride : 0;
}

// A caller that cuts C into blocks should use blocks of this size: with smaller ones, operands would be packed more
// often.
inline constexpr int64_t kGemmBlockRows = 768;
inline constexpr int64_t kGemmBlockColumns = 1024;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A thread's scratch memory, kept between calls because new memory costs a page fault every 4 KiB. It asks for huge
// pages, which avoid most TLB misses on the packed panels.
class ThreadBuffer {
 public:
  ThreadBuffer() = default;
  ThreadBuffer(const ThreadBuffer&) = delete;
  ThreadBuffer& operator=(const ThreadBuffer&) = delete;
  ~ThreadBuffer() { std::free(data_); }

  // Returns a buffer of at least `bytes` bytes, aligned to a cache line. If the buffer grows, its former content is
  // lost. Throws std::bad_alloc.
  void* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      data_ = nullptr;
      const int64_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      capacity_ = 0;
      data_ = std::aligned_alloc(static_cast<size_t>(kHugePage), static_cast<size_t>(rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = rounded;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
      madvise(data_, static_cast<size_t>(rounded), MADV_HUGEPAGE);
#endif
    }
    return data_;
  }

 private:
  static constexpr int64_t kHugePage = int64_t{2} << 20;
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

// Allocates `count` elements at the start of `memory`: returns their address, and moves `memory` past them by a
// multiple of the size of a cache line.
template <typename S>
S* carve(S*& memory, int64_t count) {
  S* begin = memory;
  memory += round_up(count, 64 / static_cast<int64_t>(sizeof(S)));
  return begin;
}

// Writes the bias of the first `columns` columns of C to `bias`, in the type of the sums. Writes zeros past column n,
// or for all columns if there is no bias.
template <typename T>
void widen_bias(const Gemm<T>& g, int64_t columns, accumulate_t<T>* bias) {
  for (int64_t j = 0; j < columns; ++j) {
    bias[j] = g.bias != nullptr && j < g.n ? to_accumulate(g.bias[j * g.bias_stride]) : accumulate_t<T>{};
  }
}

// Returns the calling thread's buffer for panels.
inline ThreadBuffer& gemm_buffer() {
  thread_local ThreadBuffer buffer;
  return buffer;
}

}  // namespace pymoe::cpu
