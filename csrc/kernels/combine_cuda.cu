// Gather-sum on the GPU. A group of threads owns a token; the slots and weights of up to eight choices are read once
// into registers. Every thread then takes one pack of columns at a time: it issues the loads of up to eight choices'
// rows before it uses the first, adds them in the order of the choices, and stores once. Threads share nothing, so
// there is no barrier and no temporary. The order of every sum, and so every bit, is the same as in the CPU twin.
//
// Memory traffic is the limit: (S + T) rows move, each once (528 MB for T 4096, K 8, H 7168 in bf16). To keep an H200's
// memory busy some 25 KB must be in flight in every SM (4.8 TB/s for 0.7 us over 132 SMs). Eight loads of 16 bytes are
// 128 bytes per thread, and with at most 80 registers three blocks of 256 threads share an SM: 96 KB. (For bf16 on
// sm_80, sm_90 and sm_100, nvcc 13 needs only 72 registers; a fourth block then fits if a block has 224 threads, as for
// H 7168.) There are separate kernels for up to two and up to four choices, with fewer loads per thread and more blocks
// per SM.
//
// With biases, a thread searches the offsets for the experts of its choices' rows when it reads the choices, and loads
// the experts' biases with the rows. A bias is read for many rows, so the caches keep it.
//
// An element costs four to five instructions per choice, three of which are inevitable (widen, multiply, add). That is
// a third of what the SMs can issue while the memory transfers the rows. So there is no branch between the choices: a
// choice without a row adds 0 * 0, which changes no sum, not even the sign of a zero, since no sum that began at +0 is
// -0.
#include "kernels/combine.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/row_group.h"

namespace pymoe::cuda {
namespace {

// Up to kAtOnce choices of a token: their rows of y, or -1 for those with nothing to add.
template <typename S, int kAtOnce>
struct Choices {
  int32_t row[kAtOnce];
  int32_t expert[kAtOnce];  // whose bias is added, or -1; unused without biases
  S weight[kAtOnce];        // 0 if nothing is added: infinity times 0 would be NaN
};

// Reads up to kAtOnce choices of a token, starting at `begin`, but none past the token's last choice.
template <typename S, int kAtOnce>
PYMOE_DEVICE void read_choices(Choices<S, kAtOnce>& now, const int32_t* slots, const S* weights, int64_t begin,
                               int64_t choices, int64_t rows) {
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const bool there = begin + k < choices;
    now.row[k] = there ? slots[begin + k] : -1;
    now.weight[k] = there && weights != nullptr ? weights[begin + k] : S{1};  // multiplying by one is exact
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (now.row[k] >= 0 && now.row[k] < rows) continue;
    now.row[k] = -1;
    now.weight[k] = 0;
  }
}

// Finds the experts of the choices' rows.
template <typename S, int kAtOnce>
PYMOE_DEVICE void find_experts(Choices<S, kAtOnce>& now, const ExpertBiases& biases) {
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t expert = expert_of_row(biases.offsets, biases.experts, now.row[k]);
    now.expert[k] = now.row[k] >= 0 && expert < biases.experts ? static_cast<int32_t>(expert) : -1;
  }
}

// Blocks per multiprocessor; few enough that threads have the registers that their loads and sums need.
template <int kAtOnce, bool kBiased>
inline constexpr int kResident = (kAtOnce <= 2   ? 5
                                  : kAtOnce <= 4 ? 4
                                                 : 3) -
                                 (kBiased ? 1 : 0);

// kInRounds: tokens may have more choices than kAtOnce, so slots and weights are read again for every column.
template <typename T, int kBytes, int kAtOnce, bool kInRounds, bool kBiased>
__global__ void __launch_bounds__(kRowThreads, (kResident<kAtOnce, kBiased>))
    combine_kernel(const T* PYMOE_RESTRICT y, const int32_t* PYMOE_RESTRICT slots,
                   const accumulate_t<T>* PYMOE_RESTRICT weights, T* PYMOE_RESTRICT out, int64_t tokens,
                   int64_t choices, int64_t rows, int64_t row_packs, int group, const ExpertBiases biases) {
  using S = accumulate_t<T>;
  constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  using P = Pack<T, kElements>;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (blockDim.x / group) + threadIdx.x / group;
  if (token >= tokens) return;
  slots += token * choices;
  if (weights != nullptr) weights += token * choices;

  Choices<S, kAtOnce> now;
  const auto read = [&](int64_t begin) {
    read_choices(now, slots, weights, begin, choices, rows);
    if constexpr (kBiased) find_experts(now, biases);
  };
  if constexpr (!kInRounds) read(0);
  for (int64_t column = threadIdx.x % group; column < row_packs; column += group) {
    S total[kElements] = {};
    int64_t begin = 0;
    do {
      if constexpr (kInRounds) read(begin);
      P values[kAtOnce], of_bias[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const auto row = static_cast<uint32_t>(now.row[k]);
        values[k] = load_pack_streaming_if<P>(now.row[k] >= 0, y + (row * row_packs + column) * kElements);
        if constexpr (kBiased) {
          const auto expert = static_cast<uint32_t>(now.expert[k]);
          of_bias[k] = load_pack_if<P>(now.expert[k] >= 0,
                                       static_cast<const T*>(biases.data) + (expert * row_packs + column) * kElements);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        S value[kElements];
        widen(values[k], value);
        if constexpr (kBiased) {
          S bias[kElements];
          widen(of_bias[k], bias);
#pragma unroll
          for (int i = 0; i < kElements; ++i) value[i] = value[i] + bias[i];
        }
#pragma unroll
        for (int i = 0; i < kElements; ++i) total[i] = total[i] + now.weight[k] * value[i];
      }
      begin += kAtOnce;
    } while (kInRounds && begin < choices);
    store_pack(out + (token * row_packs + column) * kElements, narrow<T>(total));
  }
}

template <typename T, int kBytes, int kAtOnce, bool kInRounds>
void launch_combine(const CombineArguments& a, void* stream) {
  const auto kernel = a.biases.data == nullptr ? combine_kernel<T, kBytes, kAtOnce, kInRounds, false>
                                               : combine_kernel<T, kBytes, kAtOnce, kInRounds, true>;
  const int64_t row_packs = a.hidden * static_cast<int64_t>(sizeof(T)) / kBytes;
  const RowGroup group = group_for(row_packs);
  launch("combine", kernel, {ceil_div(a.tokens, group.rows), group.block()}, stream, a.y, a.slot, a.weights, a.out,
         a.tokens, a.choices, a.rows, row_packs, group.threads, a.biases);
}

}  // namespace

void combine(const CombineArguments& a, void* stream) {
  if (a.tokens == 0 || a.hidden == 0) return;
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    constexpr int kNarrow = static_cast<int>(sizeof(T));
    const int64_t width = widest_access({a.y, a.out, a.biases.data}, a.hidden * kNarrow);
    if (width < 16) {
      launch_combine<T, kNarrow, 8, true>(a, stream);
    } else if (a.choices <= 2) {
      launch_combine<T, 16, 2, false>(a, stream);
    } else if (a.choices <= 4) {
      launch_combine<T, 16, 4, false>(a, stream);
    } else if (a.choices <= 8) {
      launch_combine<T, 16, 8, false>(a, stream);
    } else {
      launch_combine<T, 16, 8, true>(a, stream);
    }
  });
}

}  // namespace pymoe::cuda
