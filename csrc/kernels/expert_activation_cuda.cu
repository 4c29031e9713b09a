// Expert activations on the GPU: element by element, by the steps of core/activation.h, with the CPU twin's bits
// (except gelu and geglu in fp64).
//
// A row is cut into chunks of 16 bytes. A thread takes two of them, issues the loads of both (of gate and up, and of
// grad for the backward) before it computes, and stores each result once. So 64 bytes are in flight per thread for
// swiglu, and 96 for its backward; some 25 KB per SM are enough to keep an H200's memory busy. A row's base is computed
// in 64 bits, once per thread, without a division per element. Without a gate and biases all rows form one long row,
// whose last chunk may be partial; with a gate, a chunk never crosses from gate to up. If the tensors or F do not allow
// accesses of 16 bytes, or if gate and up are interleaved, elements are moved one by one.
//
// With biases every row is a row of its own. A thread searches the offsets for its row's expert once, and loads the
// chunks of the expert's bias with those of h; other rows of the expert read them, too, so the caches keep them.
//
// A swiglu element costs 38 instructions (counted in sm_90's code for bf16; 24 for e^x, ten for the division), and
// seven more for its share of a thread's fixed work. That is a few more than an H200's multiprocessors can issue in the
// time in which the memory moves the element's six bytes. Therefore one_plus_exp omits steps that do not affect 1 +
// e^x, products and sums are fused if no bit depends on it, and a row is found without a division.
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/row_group.h"
#include "kernels/expert_activation.h"

namespace pymoe::cuda {
namespace {

constexpr int kShare = 2;  // chunks per thread
constexpr int kInverseBits = 24;

// How chunks of rows are assigned to threads.
struct Strips {
  int64_t rows, features;  // of the output
  bool whole;              // true if a chunk is one access
  int step;                // distance between elements of gate: 2 if gate and up are interleaved
  uint32_t tiles;          // number of blocks that share a row; more than one only if a block has one row
  RowGroup group;
  uint32_t inverse;  // ceil(2^24 / threads per row): finds a thread's row without a division
  int64_t blocks;

  PYMOE_DEVICE int64_t to_up() const { return step == 1 ? features : 1; }  // distance from gate to up
};

// A thread's chunks, with `stride` elements from one to the next.
template <typename T>
struct Place {
  int64_t row, column;  // row and column of the first chunk
  int stride, rest;     // rest: elements from `column` to the row's end, at most those of the thread's chunks
  bool whole;           // true if every chunk is one access

  PYMOE_DEVICE int count(int j) const { return max(min(rest - j * stride, kChunk<T>), 0); }  // elements in chunk j
};

// Finds the part of a row that this thread works on. kApart: false if all rows form one long row.
template <bool kApart, typename T>
PYMOE_DEVICE Place<T> find_place(const Strips& s) {
  const uint32_t of_rows = s.tiles == 1 ? blockIdx.x : blockIdx.x / s.tiles, tile = blockIdx.x - of_rows * s.tiles;
  const int in_block = static_cast<int>(threadIdx.x * s.inverse >> kInverseBits);
  const int lane = static_cast<int>(threadIdx.x) - in_block * s.group.threads;
  Place<T> place;
  place.row = static_cast<int64_t>(of_rows) * s.group.rows + in_block;
  place.stride = s.group.threads * kChunk<T>;
  place.column = static_cast<int64_t>(tile) * kShare * place.stride + lane * kChunk<T>;
  const int64_t rest = place.row < s.rows ? s.features - place.column : 0;
  place.rest = static_cast<int>(min(rest, static_cast<int64_t>(kShare) * place.stride));
  // With kApart, `s.whole` is enough: each row, and gate and up in it, consists of whole chunks. Without it, the one
  // long row may end within a chunk, so every chunk is checked.
  place.whole = s.whole;
#pragma unroll
  for (int j = 0; j < (kApart ? 0 : kShare); ++j) {
    place.whole = place.whole && (place.count(j) == 0 || place.count(j) == kChunk<T>);
  }
  return place;
}

// Loads kCount of the thread's chunks into `to`, starting with the thread's chunk `first`, with zeros past the row's
// end. `from` is the address of the thread's chunk 0. All loads are issued together. kOnce: true if no other thread
// reads the chunks.
template <bool kWhole, bool kOnce = true, typename T, int kCount>
PYMOE_DEVICE void load_chunks(const T* PYMOE_RESTRICT from, const Place<T>& place, int first, int step,
                              Chunk<T> (&to)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const int column = (first + j) * place.stride, count = place.count(first + j);
    if constexpr (kWhole) {
      to[j] = kOnce ? load_pack_streaming_if<Chunk<T>>(count > 0, from + column)
                    : load_pack_if<Chunk<T>>(count > 0, from + column);
    } else {
      to[j] = Chunk<T>{};
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) {
        if (i < count) to[j][i] = from[(column + i) * step];
      }
    }
  }
}

template <bool kWhole, typename T>
PYMOE_DEVICE void store_chunk(T* to, const Place<T>& place, int j, int step, const Chunk<T>& chunk) {
  const int column = j * place.stride;
  if constexpr (kWhole) {
    store_pack(to + column, chunk);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      if (i < place.count(j)) to[(column + i) * step] = chunk[i];
    }
  }
}

// Calls f(kWhole, kCount, first) once for all of a thread's chunks if they are whole, otherwise once per chunk. The
// branch is outside of f: an f for both cases would assemble whole chunks from elements, too, at an instruction or two
// per element.
template <typename T, typename F>
PYMOE_DEVICE void each_chunk(const Place<T>& place, const F& f) {
  if (place.whole) return f(std::true_type{}, std::integral_constant<int, kShare>{}, 0);
#pragma unroll
  for (int j = 0; j < kShare; ++j) f(std::false_type{}, std::integral_constant<int, 1>{}, j);
}

// The bias of a thread's row, from the thread's first chunk on. If the row has no expert, `place` is empty (rest = 0).
template <typename T>
struct RowBias {
  const T* data = nullptr;
  Place<T> place{};
};

template <bool kGated, typename T>
PYMOE_DEVICE RowBias<T> find_bias(const ExpertBiases& biases, Place<T> place, const Strips& s) {
  const int64_t expert = expert_of_row(biases.offsets, biases.experts, place.row);
  const bool owned = expert < biases.experts;
  if (!owned) place.rest = 0;
  const T* const data = static_cast<const T*>(biases.data);
  return {data + (owned ? expert : 0) * s.features * (kGated ? 2 : 1) + place.column * s.step, place};
}

// The chunks that a thread works on, of gate and up or, without a gate, of h; and the chunks of their biases.
template <bool kGated, bool kBiased, bool kWhole, int kCount, typename T>
struct Inputs {
  Chunk<T> x[kCount], up[kCount], bias_x[kCount], bias_up[kCount];

  PYMOE_DEVICE Inputs(int first, const T* of_row, const Place<T>& place, const RowBias<T>& bias, const Strips& strips) {
    load_chunks<kWhole>(of_row, place, first, strips.step, x);
    if constexpr (kGated) load_chunks<kWhole>(of_row + strips.to_up(), place, first, strips.step, up);
    if constexpr (kBiased) {
      load_chunks<kWhole, false>(bias.data, bias.place, first, strips.step, bias_x);
      if constexpr (kGated)
        load_chunks<kWhole, false>(bias.data + strips.to_up(), bias.place, first, strips.step, bias_up);
    }
  }

  // Writes the values of chunk j, with the biases added, to `of_x` and `of_up`. Without a gate, nothing is written to
  // `of_up`.
  PYMOE_DEVICE void widen_chunk(int j, accumulate_t<T> (&of_x)[kChunk<T>], accumulate_t<T> (&of_up)[kChunk<T>]) const {
    widen(x[j], of_x);
    if constexpr (kGated) widen(up[j], of_up);
    if constexpr (kBiased) {
      add(bias_x[j], of_x);
      if constexpr (kGated) add(bias_up[j], of_up);
    }
  }

  static PYMOE_DEVICE void add(const Chunk<T>& bias, accumulate_t<T> (&to)[kChunk<T>]) {
    accumulate_t<T> values[kChunk<T>];
    widen(bias, values);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) to[i] = to[i] + values[i];
  }
};

template <Activation kind, bool kBiased, bool kWhole, int kCount, typename T>
PYMOE_DEVICE void activate_chunks(int first, const T* of_row, const RowBias<T>& bias, T* out, const Place<T>& place,
                                  const Strips& strips, const SwigluClamp<accumulate_t<T>>& clamp) {
  using S = accumulate_t<T>;
  const Inputs<is_gated(kind), kBiased, kWhole, kCount, T> inputs(first, of_row, place, bias, strips);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (place.count(first + j) == 0) continue;
    S of_x[kChunk<T>], of_up[kChunk<T>] = {}, results[kChunk<T>];
    inputs.widen_chunk(j, of_x, of_up);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) results[i] = activate<kind>(of_x[i], of_up[i], clamp);
    store_chunk<kWhole>(out, place, first + j, 1, narrow<T>(results));
  }
}

template <Activation kind, bool kBiased, bool kWhole, int kCount, typename T>
PYMOE_DEVICE void differentiate_chunks(int first, const T* of_grad, const T* of_row, const RowBias<T>& bias,
                                       T* grad_row, const Place<T>& place, const Strips& strips,
                                       const SwigluClamp<accumulate_t<T>>& clamp) {
  using S = accumulate_t<T>;
  constexpr bool kGated = is_gated(kind);
  Chunk<T> g[kCount];
  load_chunks<kWhole>(of_grad, place, first, 1, g);
  const Inputs<kGated, kBiased, kWhole, kCount, T> inputs(first, of_row, place, bias, strips);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (place.count(first + j) == 0) continue;
    S of_g[kChunk<T>], of_x[kChunk<T>], of_up[kChunk<T>] = {};
    widen(g[j], of_g);
    inputs.widen_chunk(j, of_x, of_up);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      S by_up = 0;
      of_x[i] = differentiate<kind>(of_g[i], of_x[i], of_up[i], by_up, clamp);
      of_up[i] = by_up;
    }
    store_chunk<kWhole>(grad_row, place, first + j, strips.step, narrow<T>(of_x));
    if constexpr (kGated)
      store_chunk<kWhole>(grad_row + strips.to_up(), place, first + j, strips.step, narrow<T>(of_up));
  }
}

// Blocks per multiprocessor: fewer with biases, because a thread then needs more registers (up to 84, in bf16).
template <bool kBiased, bool kBackward = false>
inline constexpr int kResident = kBiased     ? 2
                                 : kBackward ? 3
                                             : 4;

template <Activation kind, bool kBiased, typename T>
__global__ void __launch_bounds__(kRowThreads, kResident<kBiased>)
    expert_activation_kernel(const T* PYMOE_RESTRICT h, T* PYMOE_RESTRICT out, const Strips strips,
                             const SwigluClamp<accumulate_t<T>> clamp, const ExpertBiases biases) {
  constexpr bool kGated = is_gated(kind);
  const Place<T> place = find_place < kGated || kBiased, T > (strips);
  const T* const of_row = h + place.row * strips.features * (kGated ? 2 : 1) + place.column * strips.step;
  T* const out_row = out + place.row * strips.features + place.column;
  RowBias<T> bias{};
  if constexpr (kBiased) bias = find_bias<kGated>(biases, place, strips);
  each_chunk(place, [&](auto whole, auto count, int first) {
    activate_chunks<kind, kBiased, whole(), count()>(first, of_row, bias, out_row, place, strips, clamp);
  });
}

template <Activation kind, bool kBiased, typename T>
__global__ void __launch_bounds__(kRowThreads, (kResident<kBiased, true>))
    expert_activation_backward_kernel(const T* PYMOE_RESTRICT grad, const T* PYMOE_RESTRICT h, T* PYMOE_RESTRICT grad_h,
                                      const Strips strips, const SwigluClamp<accumulate_t<T>> clamp,
                                      const ExpertBiases biases) {
  constexpr bool kGated = is_gated(kind);
  const Place<T> place = find_place < kGated || kBiased, T > (strips);
  const int64_t base = place.row * strips.features * (kGated ? 2 : 1) + place.column * strips.step;
  const T* const of_grad = grad + place.row * strips.features + place.column;
  RowBias<T> bias{};
  if constexpr (kBiased) bias = find_bias<kGated>(biases, place, strips);
  each_chunk(place, [&](auto whole, auto count, int first) {
    differentiate_chunks<kind, kBiased, whole(), count()>(first, of_grad, h + base, bias, grad_h + base, place, strips,
                                                          clamp);
  });
}

// Returns the assignment of chunks to threads, for tensors at these addresses.
template <typename T>
Strips strips_for(std::initializer_list<const void*> addresses, const ExpertActivationArguments& a) {
  int64_t rows = a.rows, features = a.features;
  const bool apart = is_gated(a.kind) || a.biases.data != nullptr;
  if (!apart) {  // one long row
    features *= rows;
    rows = 1;
  }
  const int64_t row_bytes = apart ? features * static_cast<int64_t>(sizeof(T)) : 16;
  const int64_t chunks = ceil_div(features, kChunk<T>);
  const bool shared = chunks > kShare * kRowThreads;  // true if several blocks share a row
  const int64_t tiles = shared ? ceil_div(chunks, kShare * kRowThreads) : 1;
  const RowGroup group = shared ? RowGroup{kRowThreads, 1} : group_for(chunks, kShare);
  const bool whole = !a.interleaved && widest_access(addresses, row_bytes) == 16;
  // If `tiles` overflows, there are too many blocks, and the launch reports an error.
  return {rows,
          features,
          whole,
          a.interleaved ? 2 : 1,
          static_cast<uint32_t>(tiles),
          group,
          static_cast<uint32_t>(ceil_div(int64_t{1} << kInverseBits, group.threads)),
          ceil_div(rows, group.rows) * tiles};
}

// Calls f(kind, whether there are biases, TypeTag of the dtype); the first two are compile-time constants.
template <typename F>
void visit(const ExpertActivationArguments& a, const F& f) {
  if (a.rows == 0 || a.features == 0) return;
  visit_kind(a.kind, [&](auto kind) {
    visit_dtype(a.dtype, [&](auto type) {
      a.biases.data == nullptr ? f(kind, std::false_type{}, type) : f(kind, std::true_type{}, type);
    });
  });
}

}  // namespace

void expert_activation(const ExpertActivationArguments& a, void* stream) {
  visit(a, [&]<typename T>(auto kind, auto biased, TypeTag<T>) {
    const Strips strips = strips_for<T>({a.h, a.out, a.biases.data}, a);
    launch("expert_activation", expert_activation_kernel<kind(), biased(), T>, {strips.blocks, strips.group.block()},
           stream, a.h, a.out, strips, clamp_of<accumulate_t<T>>(a), a.biases);
  });
}

void expert_activation_backward(const ExpertActivationArguments& a, void* stream) {
  visit(a, [&]<typename T>(auto kind, auto biased, TypeTag<T>) {
    const Strips strips = strips_for<T>({a.grad, a.h, a.out, a.biases.data}, a);
    launch("expert_activation_backward", expert_activation_backward_kernel<kind(), biased(), T>,
           {strips.blocks, strips.group.block()}, stream, a.grad, a.h, a.out, strips, clamp_of<accumulate_t<T>>(a),
           a.biases);
  });
}

}  // namespace pymoe::cuda
