// Matrix products on one thread: C = A B (+ bias), the building block of grouped_linear.
//
// A is (m, k), B is (k, n), both with any strides; C is (m, n) with contiguous rows. fp64 sums in fp64, every other
// dtype in fp32, rounded once. The order of an element's sum depends only on k and on which operand is contiguous along
// it, not on m, n or the element's position in C: a caller may cut C into any tiles. The rows of A and C, or the steps
// of k, may be in any order, given by an index: the bits are the same as for consecutive operands.
//
//   gemm_nt.h             A and B contiguous along k: nothing is packed, a sum is kept in the lanes of a vector
//   gemm_nt_packed.h      the same sums for many rows, from panels that keep a lane's elements together
//
// All others follow BLIS (Van Zee and van de Geijn, ACM TOMS 41-3, 2015), and a shorter scheme for few rows:
//
//   gemm_micro_kernel.h   a tile of kTileRows x kTileColumns in registers, from packed panels
//   gemm_pack.h           panels from strided memory, widened to the type of sums, or as pairs of bf16
//   gemm_in_place.h       few rows and a B whose rows are contiguous: B is read in place
//   gemm_body.h chooses among these, and loops over blocks of k, rows and columns that fit the caches
//
// bf16 has a separate scheme if the processor multiplies tiles: gemm_amx.h, with gemm_amx_pack.h,
// gemm_amx_store.h and the instructions in amx_tiles.h.
//
// They are compiled once per instruction set, in kernels/grouped_linear_cpu.cpp; other files call chosen_gemm.
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

  // Row i of A and of C is at row rows[i] from their begin, and step p of k is at column steps[p] of A and row steps[p]
  // of B; null: in order. With `rows` a row of A is contiguous, with `steps` a column of A and a row of B.
  const int32_t* rows = nullptr;
  const int32_t* steps = nullptr;
};

// Returns the gemm for T of the instruction set in use.
template <typename T>
auto chosen_gemm() -> void (*)(const Gemm<T>&);

// Returns element i of an order, or i if the order is null.
PYMOE_INLINE int64_t place_of(const int32_t* order, int64_t i) { return order == nullptr ? i : order[i]; }

// For a loop that begins at element i: order_from returns the rest of the order. move_to returns the offset to add to
// the pointer; it is 0 with an order, whose values count from the original start.
PYMOE_INLINE const int32_t* order_from(const int32_t* order, int64_t i) {
  return order == nullptr ? nullptr : order + i;
}
PYMOE_INLINE int64_t move_to(const int32_t* order, int64_t i, int64_t stride) {
  return order == nullptr ? i * stride : 0;
}

// Blocks of C should have this size: smaller blocks would pack operands more often.
inline constexpr int64_t kGemmBlockRows = 768;
inline constexpr int64_t kGemmBlockColumns = 1024;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Scratch memory of a thread, kept between calls: new memory costs a page fault every 4 KiB, and huge pages save
// the packed panels most of their TLB misses.
class ThreadBuffer {
 public:
  ThreadBuffer() = default;
  ThreadBuffer(const ThreadBuffer&) = delete;
  ThreadBuffer& operator=(const ThreadBuffer&) = delete;
  ~ThreadBuffer() { std::free(data_); }

  // Returns at least `bytes` bytes, aligned to a cache line. The former content is lost if the buffer grows.
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

// Takes `count` elements from the front of `memory`, rounded up to whole cache lines.
template <typename S>
S* carve(S*& memory, int64_t count) {
  S* begin = memory;
  memory += round_up(count, 64 / static_cast<int64_t>(sizeof(S)));
  return begin;
}

// Copies bias[j] for j < columns, in the type of sums; zeros without a bias.
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
