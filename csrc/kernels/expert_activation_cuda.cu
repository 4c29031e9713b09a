// Expert activations on the GPU: element by element, by the steps of core/activation.h, so the CPU twin's bits.
//
// A row is cut into chunks of 16 bytes; a thread takes two of them, issues the loads of both (of gate and up, and of
// grad for the backward) before it computes, and stores each result once: 64 bytes on their way a thread for swiglu,
// 96 for its backward, where some 25 KB an SM keep an H200's memory busy. A row's base is reckoned in 64 bits, once a
// thread, without a division an element. Without a gate all rows are one long row, whose last chunk may be partial;
// with one, a chunk never crosses from gate to up. Where the tensors or F do not allow accesses of 16 bytes, elements
// are moved one by one.
//
// A swiglu element costs some 45 instructions (counted in sm_90's code for bf16; 26 are e^x, ten the division), about
// as many as the SMs can issue while its six bytes pass: hence one_plus_exp, which leaves out what 1 + e^x cannot show.
#include <cstdint>
#include <initializer_list>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/row_group.h"
#include "kernels/expert_activation.h"

namespace pymoe::cuda {
namespace {

constexpr int kShare = 2;  // chunks a thread

// Which thread takes which chunks of which row.
struct Strips {
  int64_t rows, features;  // of the output
  bool whole;              // chunks may be moved by one access
  int step;                // from an element of gate to the next: 2 where gate and up are interleaved
  uint32_t tiles;          // blocks that share a row; more than one only where a block has one row
  RowGroup group;
  int64_t blocks;
};

// A thread's chunks.
template <typename T>
struct Place {
  int64_t row, column[kShare];
  int count[kShare];   // elements in the chunk, 0: none
  bool whole[kShare];  // one access moves it
};

template <typename T>
PYMOE_DEVICE Place<T> find_place(const Strips& s) {
  Place<T> place;
  const int thread = static_cast<int>(threadIdx.x), share = s.group.threads * kShare;
  place.row = static_cast<int64_t>(blockIdx.x / s.tiles) * s.group.rows + thread / s.group.threads;
  const int64_t first = static_cast<int64_t>(blockIdx.x % s.tiles) * share + thread % s.group.threads;
#pragma unroll
  for (int j = 0; j < kShare; ++j) {
    place.column[j] = (first + j * s.group.threads) * kChunk<T>;
    const int64_t rest = place.row < s.rows ? s.features - place.column[j] : 0;
    place.count[j] = static_cast<int>(max(min(rest, int64_t{kChunk<T>}), int64_t{0}));
    place.whole[j] = s.whole && place.count[j] == kChunk<T>;
  }
  return place;
}

// The chunks of the row that begins at `row`, where one access moves them. These loads are issued together; the others
// have their turn after them, in load_parts.
template <typename T>
PYMOE_DEVICE void load_whole(const T* row, const Place<T>& place, Chunk<T> (&to)[kShare]) {
#pragma unroll
  for (int j = 0; j < kShare; ++j) {
    to[j] = Chunk<T>{};
    if (place.whole[j]) to[j] = load_pack_streaming<Chunk<T>>(row + place.column[j]);
  }
}

template <typename T>
PYMOE_DEVICE void load_parts(const T* row, const Place<T>& place, Chunk<T> (&to)[kShare], int step = 1) {
#pragma unroll
  for (int j = 0; j < kShare; ++j) {
    if (place.whole[j]) continue;
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      if (i < place.count[j]) to[j][i] = row[(place.column[j] + i) * step];
    }
  }
}

template <typename T>
PYMOE_DEVICE void store_chunk(T* row, const Place<T>& place, int j, const Chunk<T>& chunk, int step = 1) {
  if (place.whole[j]) {
    store_pack(row + place.column[j], chunk);
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    if (i < place.count[j]) row[(place.column[j] + i) * step] = chunk[i];
  }
}

template <Activation kind, typename T>
__global__ void __launch_bounds__(kRowThreads, 4)
    expert_activation_kernel(const T* PYMOE_RESTRICT h, T* PYMOE_RESTRICT out, const Strips strips,
                             const SwigluClamp<accumulate_t<T>> clamp) {
  using S = accumulate_t<T>;
  constexpr bool kGated = is_gated(kind);
  const Place<T> place = find_place<T>(strips);
  const T* const of_row = h + place.row * strips.features * (kGated ? 2 : 1);
  Chunk<T> x[kShare], up[kShare];
  const int64_t to_up = strips.step == 1 ? strips.features : 1;
  load_whole(of_row, place, x);
  if constexpr (kGated) load_whole(of_row + to_up, place, up);
  if (!place.whole[kShare - 1] || !place.whole[0]) {
    load_parts(of_row, place, x, strips.step);
    if constexpr (kGated) load_parts(of_row + to_up, place, up, strips.step);
  }
#pragma unroll
  for (int j = 0; j < kShare; ++j) {
    if (place.count[j] == 0) continue;
    S results[kChunk<T>];
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      results[i] = activate<kind>(to_accumulate(x[j][i]), kGated ? to_accumulate(up[j][i]) : S{0}, clamp);
    }
    store_chunk(out + place.row * strips.features, place, j, narrow<T>(results));
  }
}

template <Activation kind, typename T>
__global__ void __launch_bounds__(kRowThreads, 3)
    expert_activation_backward_kernel(const T* PYMOE_RESTRICT grad, const T* PYMOE_RESTRICT h, T* PYMOE_RESTRICT grad_h,
                                      const Strips strips, const SwigluClamp<accumulate_t<T>> clamp) {
  using S = accumulate_t<T>;
  constexpr bool kGated = is_gated(kind);
  const Place<T> place = find_place<T>(strips);
  const int64_t base = place.row * strips.features * (kGated ? 2 : 1);
  const T* const of_row = h + base;
  const T* const of_grad = grad + place.row * strips.features;
  Chunk<T> g[kShare], x[kShare], up[kShare];
  load_whole(of_grad, place, g);
  const int64_t to_up = strips.step == 1 ? strips.features : 1;
  load_whole(of_row, place, x);
  if constexpr (kGated) load_whole(of_row + to_up, place, up);
  if (!place.whole[kShare - 1] || !place.whole[0]) {
    load_parts(of_grad, place, g);
    load_parts(of_row, place, x, strips.step);
    if constexpr (kGated) load_parts(of_row + to_up, place, up, strips.step);
  }
#pragma unroll
  for (int j = 0; j < kShare; ++j) {
    if (place.count[j] == 0) continue;
    S of_x[kChunk<T>], of_up[kChunk<T>];
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      of_x[i] = differentiate<kind>(to_accumulate(g[j][i]), to_accumulate(x[j][i]),
                                    kGated ? to_accumulate(up[j][i]) : S{0}, of_up[i], clamp);
    }
    store_chunk(grad_h + base, place, j, narrow<T>(of_x), strips.step);
    if constexpr (kGated) store_chunk(grad_h + base + to_up, place, j, narrow<T>(of_up), strips.step);
  }
}

// `addresses` are those of all tensors.
template <typename T>
Strips strips_for(std::initializer_list<const void*> addresses, const ExpertActivationArguments& a) {
  int64_t rows = a.rows, features = a.features;
  const bool gated = is_gated(a.kind);
  if (!gated) {  // one long row
    features *= rows;
    rows = 1;
  }
  const int64_t row_bytes = gated ? features * static_cast<int64_t>(sizeof(T)) : 16;
  const int64_t chunks = ceil_div(features, kChunk<T>);
  const bool shared = chunks > kShare * kRowThreads;  // a row has several blocks
  const int64_t tiles = shared ? ceil_div(chunks, kShare * kRowThreads) : 1;
  const RowGroup group = shared ? RowGroup{kRowThreads, 1} : group_for(chunks, kShare);
  const bool whole = !a.interleaved && widest_access(addresses, row_bytes) == 16;
  // Where `tiles` does not fit, there are too many blocks, and the launch says so.
  return {rows,
          features,
          whole,
          a.interleaved ? 2 : 1,
          static_cast<uint32_t>(tiles),
          group,
          ceil_div(rows, group.rows) * tiles};
}

}  // namespace

void expert_activation(const ExpertActivationArguments& a, void* stream) {
  if (a.rows == 0 || a.features == 0) return;
  visit_kind(a.kind, [&](auto kind) {
    visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
      const Strips strips = strips_for<T>({a.h, a.out}, a);
      launch("expert_activation", expert_activation_kernel<kind(), T>, {strips.blocks, strips.group.block()}, stream,
             a.h, a.out, strips, clamp_of<accumulate_t<T>>(a));
    });
  });
}

void expert_activation_backward(const ExpertActivationArguments& a, void* stream) {
  if (a.rows == 0 || a.features == 0) return;
  visit_kind(a.kind, [&](auto kind) {
    visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
      const Strips strips = strips_for<T>({a.grad, a.h, a.out}, a);
      launch("expert_activation_backward", expert_activation_backward_kernel<kind(), T>,
             {strips.blocks, strips.group.block()}, stream, a.grad, a.h, a.out, strips, clamp_of<accumulate_t<T>>(a));
    });
  });
}

}  // namespace pymoe::cuda
