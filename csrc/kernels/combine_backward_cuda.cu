// The backward of the gather-sum on the GPU, in one pass over grad and y. A group of threads owns a token and takes its
// choices up to eight at a time. Every thread reads a chunk of 16 bytes of grad, issues the loads of the eight chunks
// of y, writes the eight chunks of dy, and keeps eight sums of products; at the end of the row the group adds up its
// threads' sums. A token's group also clears its share of the rows of dy that are not in use: t, t + T, t + 2 T, ...
//
// The order of a dweight: the products of a chunk are added as a balanced tree; thread i of the group adds the trees of
// chunks i, i + threads, ... in turn; the threads of a warp are added by the bits of their lanes, from the highest
// down; the warps in turn. The number of threads depends only on H and the dtype, and a chunk has 16 bytes for any
// alignment of the tensors, so a result depends on neither grid nor address.
//
// With biases, those of the choices' experts are loaded with the chunks of y and added to these before the products.
//
// Bytes: (T + 2 S) rows, each once (998 MB for T 4096, K 8, H 7168 in bf16). Two blocks of 256 threads with 144 bytes
// in flight per thread are 72 KB per SM, and as much again to store; some 25 KB are needed (combine_cuda.cu). Up to two
// and up to four choices have separate kernels, with fewer loads per thread and more blocks. An element costs six to
// seven instructions per choice (bf16 on sm_90), half of what the SMs can issue meanwhile.
#include <algorithm>

#include "kernels/combine.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/row_group.h"

namespace pymoe::cuda {
namespace {

// Largest number of choices whose values fit into the registers together.
template <typename T>
constexpr int kMostAtOnce = sizeof(T) == 8 ? 4 : 8;

// load_chunk and store_chunk move a chunk of a row by accesses of kBytes. If kBytes is less than the size of a chunk,
// the row may end within the chunk, and only the chunk's first `count` elements are accessed. kOnce: true if no other
// thread reads the chunk.
template <int kBytes, bool kOnce = true, typename T>
PYMOE_DEVICE Chunk<T> load_chunk(const T* from, int count) {
  if constexpr (kBytes == 16) {
    return kOnce ? load_pack_streaming<Chunk<T>>(from) : load_pack<Chunk<T>>(from);
  } else {
    Chunk<T> chunk{};
    for (int i = 0; i < kChunk<T>; ++i) {
      if (i < count) chunk[i] = from[i];
    }
    return chunk;
  }
}

template <int kBytes, typename T>
PYMOE_DEVICE void store_chunk(T* to, const Chunk<T>& chunk, int count) {
  if constexpr (kBytes == 16) {
    store_pack(to, chunk);
  } else {
    for (int i = 0; i < kChunk<T>; ++i) {
      if (i < count) to[i] = chunk[i];
    }
  }
}

// Returns the sum of the values, added as a balanced tree: i and i + kCount / 2, and so on.
template <typename S, int kCount>
PYMOE_DEVICE S tree_sum(S (&values)[kCount]) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
  }
  return values[0];
}

// The sums that a lane has after add_lanes: `count` of them (possibly 0), starting at index `first`.
struct Held {
  int first, count;
};

// Sums each of kCount values over the `lanes` lanes of a group within a warp. Lanes are combined by the bits of their
// index, from the highest down. While a lane has several sums, it swaps half of them for its partner's other half: 9
// shuffles for 8 sums over 32 lanes, compared with 40 for 8 sums one by one. The sums that the lane has in the end come
// first in `sums`.
template <typename S, int kCount>
PYMOE_DEVICE Held add_lanes(S (&sums)[kCount], int lane, int lanes) {
  int bit = lanes / 2, count = kCount;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    if (bit == 0) continue;
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const S given = upper ? sums[i] : sums[i + half];
      sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(kFullWarp, given, bit);
    }
    bit /= 2;
    count = half;
  }
  for (; bit > 0; bit /= 2) sums[0] = sums[0] + __shfl_xor_sync(kFullWarp, sums[0], bit);
  const int sharers = lanes > kCount ? lanes / kCount : 1, position = lane % lanes;  // lanes that hold the same sum
  return {position / sharers * count, position % sharers == 0 ? count : 0};
}

template <typename T>
struct Rows {
  const T* PYMOE_RESTRICT grad;
  const T* PYMOE_RESTRICT y;
  const int32_t* PYMOE_RESTRICT slots;
  const int32_t* PYMOE_RESTRICT used;
  const accumulate_t<T>* PYMOE_RESTRICT weights;
  T* PYMOE_RESTRICT dy;                      // or null
  accumulate_t<T>* PYMOE_RESTRICT dweights;  // or null
  int64_t tokens, choices, rows, hidden;
  int64_t row_chunks;  // chunks per row; the last may be partial
  int group;           // threads per token
  ExpertBiases biases;
};

// Clears the unused rows of dy among rows `token`, `token` + T, `token` + 2 T, ...
template <typename T, int kBytes>
PYMOE_DEVICE void clear_rows(const Rows<T>& a, int64_t token, int32_t used, int lane) {
  for (int64_t row = token; row < a.rows; row += max(a.tokens, int64_t{1})) {
    if (row < used) continue;
    for (int64_t chunk = lane; chunk < a.row_chunks; chunk += a.group) {
      const int64_t column = chunk * kChunk<T>;
      store_chunk<kBytes>(a.dy + row * a.hidden + column, Chunk<T>{},
                          static_cast<int>(min(a.hidden - column, int64_t{kChunk<T>})));
    }
  }
}

// Blocks per multiprocessor; few enough that threads have registers for all values, without local memory.
template <typename T, int kBytes, int kAtOnce>
inline constexpr int kResident = kAtOnce <= 2                                    ? 4
                                 : kAtOnce <= 4 && sizeof(T) < 8 && kBytes == 16 ? 3
                                                                                 : 2;

template <typename T, int kBytes, int kAtOnce, bool kBiased>
__global__ void __launch_bounds__(kRowThreads, (kBiased ? 1 : kResident<T, kBytes, kAtOnce>))
    combine_backward_kernel(const Rows<T> a) {
  using S = accumulate_t<T>;
  constexpr int kWarps = kRowThreads / kWarp;
  PYMOE_SHARED(S, shared_sums, 2 * kWarps * kAtOnce);

  const int lane = static_cast<int>(threadIdx.x) % a.group, in_block = static_cast<int>(threadIdx.x) / a.group;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (blockDim.x / a.group) + in_block;
  const bool there = token < a.tokens;  // no early return, because all threads of the block must reach the barriers
  const bool with_rows = a.dy != nullptr, with_weights = a.dweights != nullptr;
  const int32_t used = with_rows ? *a.used : 0;  // loaded together with the slots
  const T* grad = a.grad + token * a.hidden;

  for (int64_t begin = 0, round = 0; begin < a.choices; begin += kAtOnce, ++round) {
    int32_t row[kAtOnce];
    S weight[kAtOnce], sums[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const bool chosen = there && begin + k < a.choices;
      row[k] = chosen ? a.slots[token * a.choices + begin + k] : -1;
      weight[k] = chosen && with_rows ? a.weights[token * a.choices + begin + k] : S{0};
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) row[k] = row[k] < a.rows ? row[k] : -1;
    const T* of_expert[kAtOnce];  // the bias of the row's expert, or null
#pragma unroll
    for (int k = 0; k < (kBiased ? kAtOnce : 0); ++k) {
      of_expert[k] = row[k] >= 0 ? bias_of_row<T>(a.biases, row[k], a.hidden) : nullptr;
    }
    for (int64_t chunk = there ? lane : a.row_chunks; chunk < a.row_chunks; chunk += a.group) {
      const int64_t column = chunk * kChunk<T>;
      const int count = static_cast<int>(min(a.hidden - column, int64_t{kChunk<T>}));
      const Chunk<T> of_grad = load_chunk<kBytes>(grad + column, count);
      Chunk<T> of_y[kAtOnce], of_bias[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        // Reads grad again if there is no row of y to read: a load behind a branch would not be issued with the others.
        const T* const from = with_weights && row[k] >= 0 ? a.y + static_cast<uint32_t>(row[k]) * a.hidden : grad;
        of_y[k] = load_chunk<kBytes>(from + column, count);
        if constexpr (kBiased) {
          of_bias[k] = load_chunk<kBytes, false>((of_expert[k] != nullptr ? of_expert[k] : grad) + column, count);
        }
      }
      S g[kChunk<T>];
      widen(of_grad, g);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        // Computes the sum even if it is not used: with a branch, the compiler would move the load of y behind the
        // branch.
        S products[kChunk<T>];
        widen(of_y[k], products);
        if constexpr (kBiased) {
          S bias[kChunk<T>];
          widen(of_bias[k], bias);
#pragma unroll
          for (int i = 0; i < kChunk<T>; ++i) products[i] = products[i] + (of_expert[k] != nullptr ? bias[i] : S{0});
        }
#pragma unroll
        for (int i = 0; i < kChunk<T>; ++i) products[i] = g[i] * products[i];
        const S sum = sums[k] + tree_sum(products);
        sums[k] = row[k] >= 0 ? sum : sums[k];
        if (row[k] < 0 || row[k] >= used) continue;  // without dy, `used` is 0
#pragma unroll
        for (int i = 0; i < kChunk<T>; ++i) products[i] = weight[k] * g[i];
        store_chunk<kBytes>(a.dy + static_cast<uint32_t>(row[k]) * a.hidden + column, narrow<T>(products), count);
      }
    }
    if (!with_weights) continue;

    const Held held = add_lanes(sums, lane % kWarp, min(a.group, kWarp));
    // Rounds alternate between two halves of shared memory: the next round's barrier separates this round's reads from
    // later writes.
    S* const of_block = shared_sums + (round % 2) * kWarps * kAtOnce;
    const int warp = static_cast<int>(threadIdx.x) / kWarp, warps = a.group / kWarp;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = held.first + i;
      if (i >= held.count) continue;
      if (warps > 1) {
        of_block[warp * kAtOnce + k] = sums[i];
      } else if (there && begin + k < a.choices) {
        a.dweights[token * a.choices + begin + k] = sums[i];
      }
    }
    if (warps > 1) {
      __syncthreads();
      if (there && lane < kAtOnce && begin + lane < a.choices) {
        S total = of_block[warp * kAtOnce + lane];  // this thread is in the group's first warp
        for (int i = 1; i < warps; ++i) total = total + of_block[(warp + i) * kAtOnce + lane];
        a.dweights[token * a.choices + begin + lane] = total;
      }
    }
  }
  // Without any token, the first group clears all rows.
  if ((there || token == 0) && with_rows) clear_rows<T, kBytes>(a, token, used, lane);
}

template <typename T, int kBytes, int kAtOnce>
void launch_combine_backward(const CombineBackwardArguments& a, void* stream) {
  using S = accumulate_t<T>;
  const int64_t row_chunks = ceil_div(a.hidden, kChunk<T>);
  const RowGroup group = group_for(row_chunks);
  const Rows<T> rows{static_cast<const T*>(a.grad),
                     static_cast<const T*>(a.y),
                     a.slot,
                     a.used,
                     static_cast<const S*>(a.weights),
                     static_cast<T*>(a.dy),
                     static_cast<S*>(a.dweights),
                     a.tokens,
                     a.choices,
                     a.rows,
                     a.hidden,
                     row_chunks,
                     group.threads,
                     a.biases};
  const bool biased = a.dweights != nullptr && a.biases.data != nullptr;
  launch(
      "combine_backward",
      biased ? combine_backward_kernel<T, kBytes, kAtOnce, true> : combine_backward_kernel<T, kBytes, kAtOnce, false>,
      {ceil_div(std::max<int64_t>(a.tokens, 1), group.rows), group.block()}, stream, rows);
}

}  // namespace

void combine_backward(const CombineBackwardArguments& a, void* stream) {
  if ((a.dy == nullptr && a.dweights == nullptr) || (a.rows == 0 && a.tokens * a.choices == 0)) return;
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    constexpr int kNarrow = static_cast<int>(sizeof(T));
    if (widest_access({a.grad, a.y, a.dy, a.biases.data}, a.hidden * kNarrow) < 16) {
      launch_combine_backward<T, kNarrow, 4>(a, stream);
    } else if (a.choices <= 2) {
      launch_combine_backward<T, 16, 2>(a, stream);
    } else if (a.choices <= 4) {
      launch_combine_backward<T, 16, 4>(a, stream);
    } else {
      launch_combine_backward<T, 16, kMostAtOnce<T>>(a, stream);
    }
  });
}

}  // namespace pymoe::cuda
