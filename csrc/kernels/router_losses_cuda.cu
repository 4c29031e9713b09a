// The router's losses on the GPU. Sixteen threads take a token, thread i the experts i, i + 16, ...: these are the
// lanes of sums over experts (core/score.h), so every sum has the CPU twin's order and bits. A row is read from memory
// once, for its maximum, and after that from L1: 64 rows of 256 experts are 64 KB. Any number of experts is possible.
//
// Forward: a block of 1024 threads takes kLossBlock tokens, one token per group; two of its threads add up the results
// of the tokens, in order, into the workspace. A second launch of one warp adds up the blocks. So there are no float
// atomics, whose order would vary, and no counter that must start at zero. Backward: one launch, every gradient written
// once.
//
// The share f_e of each expert is computed from the load on the device. Every block adds up the loads (integers, so in
// any order) and fills a table in shared memory; if there are too many experts for a table, f_e is divided at each use.
#include <cmath>
#include <limits>

#include "kernels/cuda/lane_group.h"
#include "kernels/router_losses.h"

namespace pymoe::cuda {
namespace {

constexpr int kForwardThreads = static_cast<int>(kLossBlock) * kSumLanes;
constexpr int kBackwardThreads = 512;
constexpr int64_t kMostTableBytes = 32 << 10, kLeastBytes = 16;  // the least is for a launch without a table

// The share of each expert in all choices: f_e of router_losses.h.
template <typename S>
struct Fraction {
  const void* load;  // null: no balancing loss
  bool wide;
  S* table;  // null: no table
  S total;

  PYMOE_DEVICE int64_t load_of(int64_t e) const {
    return wide ? static_cast<const int64_t*>(load)[e] : int64_t{static_cast<const int32_t*>(load)[e]};
  }
  PYMOE_DEVICE S of(int64_t e) const { return table != nullptr ? table[e] : static_cast<S>(load_of(e)) / total; }
};

// Returns the shares, after filling `table`, which has room for E values or is null. All threads of the block must call
// it.
template <typename S>
PYMOE_DEVICE Fraction<S> find_fraction(const void* load, bool wide, int64_t num_experts, S* table) {
  PYMOE_SHARED(unsigned long long, sum, 1);
  Fraction<S> fraction{load, wide, table, S{1}};
  if (load == nullptr) return fraction;
  if (threadIdx.x == 0) *sum = 0;
  __syncthreads();
  unsigned long long mine = 0;  // unsigned: a load comes from the caller and may have any values
  for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    mine += static_cast<unsigned long long>(fraction.load_of(e));
  }
  mine = reduce_lanes<kWarp>(mine, Sum{});
  if (threadIdx.x % kWarp == 0 && mine != 0) atomicAdd(sum, mine);
  __syncthreads();
  fraction.total = static_cast<S>(max(static_cast<int64_t>(*sum), int64_t{1}));
  if (table != nullptr) {
    for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
      table[e] = static_cast<S>(fraction.load_of(e)) / fraction.total;
    }
    __syncthreads();
  }
  return fraction;
}

// Statistics of one token's row. A score is e^(l - max) with softmax, and sigmoid(l) with sigmoid.
template <typename S>
struct RowStatistics {
  S max;  // the greatest logit that is not NaN
  bool has_nan;
  S sum;                   // of e^(l - max)
  S score_sum, score_dot;  // sums of the unnormalised scores, and of scores times f
};

// Returns the statistics of a row. All lanes of a warp must call it: a token's 16 lanes pass its row, and lanes without
// a token pass size 0.
template <typename T, typename S = accumulate_t<T>>
PYMOE_DEVICE RowStatistics<S> row_statistics(const T* row, int64_t size, bool with_exps, bool with_sigmoids,
                                             const Fraction<S>& fraction, int lane) {
  RowStatistics<S> r{};
  const bool balanced = fraction.load != nullptr;
  if (with_exps) {
    S max = -std::numeric_limits<S>::infinity();
    int nan = 0;
#pragma unroll 8
    for (int64_t e = lane; e < size; e += kSumLanes) {
      const S value = to_accumulate(row[e]);
      max = value > max ? value : max;
      nan |= value != value;
    }
#pragma unroll
    for (int half = kSumLanes / 2; half > 0; half /= 2) {
      const S other = __shfl_xor_sync(kFullWarp, max, half);
      max = other > max ? other : max;
      nan |= __shfl_xor_sync(kFullWarp, nan, half);
    }
    r.max = max;
    r.has_nan = nan != 0;
    S sum = 0, dot = 0;
#pragma unroll 2
    for (int64_t e = lane; e < size; e += kSumLanes) {
      const S exp = exp_in_fixed_steps(to_accumulate(row[e]) - max);
      sum = sum + exp;
      if (balanced) dot = dot + exp * fraction.of(e);
    }
    r.sum = r.score_sum = reduce_lanes<kSumLanes>(sum, Sum{});
    r.score_dot = reduce_lanes<kSumLanes>(dot, Sum{});
  }
  if (with_sigmoids) {
    S sum = 0, dot = 0;
#pragma unroll 2
    for (int64_t e = lane; e < size; e += kSumLanes) {
      const S score = sigmoid_in_fixed_steps(to_accumulate(row[e]));
      sum = sum + score;
      dot = dot + score * fraction.of(e);
    }
    r.score_sum = reduce_lanes<kSumLanes>(sum, Sum{});
    r.score_dot = reduce_lanes<kSumLanes>(dot, Sum{});
  }
  return r;
}

// Returns the logsumexp of a row. If the maximum is infinite, the terms of the sum are NaN, so the maximum is returned,
// or NaN if the row contains a NaN.
template <typename S>
PYMOE_DEVICE S logsumexp_of(const RowStatistics<S>& r) {
  if (r.max - r.max == S{0}) return r.max + std::log(r.sum);
  return r.has_nan ? std::numeric_limits<S>::quiet_NaN() : r.max;
}

template <typename T>
__global__ void __launch_bounds__(kForwardThreads)
    router_losses_kernel(const T* PYMOE_RESTRICT logits, const void* load, bool wide, bool with_z, Score score,
                         double* PYMOE_RESTRICT of_blocks, int64_t tokens, int64_t num_experts, bool with_table) {
  using S = accumulate_t<T>;
  PYMOE_DYNAMIC_SHARED(S, table);
  PYMOE_SHARED(S, of_tokens, 2 * kLossBlock);
  const auto fraction = find_fraction<S>(load, wide, num_experts, with_table ? table : nullptr);
  const bool sigmoids = load != nullptr && score == Score::kSigmoid;
  const int lane = static_cast<int>(threadIdx.x) % kSumLanes, group = static_cast<int>(threadIdx.x) / kSumLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kLossBlock, count = min(tokens - first, kLossBlock);
  const bool there = group < count;
  const auto r = row_statistics<T>(logits + (there ? first + group : 0) * num_experts, there ? num_experts : 0,
                                   with_z || !sigmoids, sigmoids, fraction, lane);
  if (there && lane == 0) {
    const S lse = with_z ? logsumexp_of(r) : S{0};
    of_tokens[group] = load != nullptr ? r.score_dot / (sigmoids ? floored_sum(r.score_sum) : r.score_sum) : S{0};
    of_tokens[kLossBlock + group] = lse * lse;
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0 && threadIdx.x < 2 * kWarp) {  // two warps, one for each sum
    const int which = static_cast<int>(threadIdx.x) / kWarp;
    S sum = 0;
#pragma unroll 16
    for (int64_t i = 0; i < count; ++i) sum = sum + of_tokens[which * kLossBlock + i];
    of_blocks[which * gridDim.x + blockIdx.x] = sum;
  }
}

// Adds up the sums of the blocks and writes both losses. Launch it with one warp: each half of the warp computes one
// loss.
__global__ void __launch_bounds__(kWarp)
    router_losses_total_kernel(const double* PYMOE_RESTRICT of_blocks, int64_t blocks, int64_t tokens,
                               int64_t num_experts, bool is_double, void* balance, void* z) {
  const int lane = static_cast<int>(threadIdx.x) % kSumLanes, which = static_cast<int>(threadIdx.x) / kSumLanes;
  double sum = 0;
#pragma unroll 8
  for (int64_t block = lane; block < blocks; block += kSumLanes) sum = sum + of_blocks[which * blocks + block];
  sum = reduce_lanes<kSumLanes>(sum, Sum{});
  if (lane != 0) return;
  double mean = tokens == 0 ? 0 : sum / static_cast<double>(tokens);
  if (which == 0) mean = mean * static_cast<double>(num_experts);
  void* const target = which == 0 ? balance : z;
  if (is_double) {
    *static_cast<double*>(target) = mean;
  } else {
    *static_cast<float*>(target) = static_cast<float>(mean);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    router_losses_backward_kernel(const T* PYMOE_RESTRICT logits, const void* load, bool wide, bool with_z, Score score,
                                  const accumulate_t<T>* grad_balance, const accumulate_t<T>* grad_z,
                                  T* PYMOE_RESTRICT grad_logits, int64_t tokens, int64_t num_experts, bool with_table) {
  using S = accumulate_t<T>;
  PYMOE_DYNAMIC_SHARED(S, table);
  const auto fraction = find_fraction<S>(load, wide, num_experts, with_table ? table : nullptr);
  const bool balanced = load != nullptr, sigmoids = balanced && score == Score::kSigmoid;
  const int lane = static_cast<int>(threadIdx.x) % kSumLanes, group = static_cast<int>(threadIdx.x) / kSumLanes;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kBackwardThreads / kSumLanes) + group;
  const bool there = token < tokens;
  const T* const row = logits + (there ? token : 0) * num_experts;
  const auto r = row_statistics<T>(row, there ? num_experts : 0, with_z || !sigmoids, sigmoids, fraction, lane);
  if (!there) return;

  T* const out = grad_logits + token * num_experts;
  const S of_balance = balanced ? *grad_balance * static_cast<S>(num_experts) / static_cast<S>(tokens) : S{0};
  const S along_z = with_z ? S{2} * *grad_z / static_cast<S>(tokens) * (r.max + std::log(r.sum)) : S{0};
  const S divisor = sigmoids ? floored_sum(r.score_sum) : r.sum;
  const bool floored = sigmoids && r.score_sum < static_cast<S>(kScoreSumFloor);
  const S mean = !balanced || floored ? S{0} : r.score_dot / divisor;
#pragma unroll 2
  for (int64_t e = lane; e < num_experts; e += kSumLanes) {
    const S value = to_accumulate(row[e]);
    S grad;
    if (sigmoids) {
      const S s = sigmoid_in_fixed_steps(value);
      grad = of_balance * (fraction.of(e) - mean) / divisor * (S{1} - s) * s;
      if (with_z) grad = grad + exp_in_fixed_steps(value - r.max) / r.sum * along_z;
    } else {
      S slope = along_z;
      if (balanced) slope = slope + of_balance * (fraction.of(e) - mean);
      grad = exp_in_fixed_steps(value - r.max) / r.sum * slope;
    }
    out[e] = round_to<T>(grad);
  }
}

// Returns the size of the table of shares in bytes; 0 if there is none.
template <typename S>
int64_t table_bytes(const void* load, int64_t num_experts) {
  const int64_t bytes = num_experts * static_cast<int64_t>(sizeof(S));
  return load != nullptr && bytes <= kMostTableBytes ? bytes : 0;
}

}  // namespace

void router_losses(const RouterLossesArguments& a, void* stream) {
  const int64_t blocks = ceil_div(a.tokens, kLossBlock);
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    const int64_t bytes = table_bytes<accumulate_t<T>>(a.load, a.num_experts);
    launch("router_losses", router_losses_kernel<T>, {blocks, kForwardThreads, max(bytes, kLeastBytes)}, stream,
           a.logits, a.load, a.load_is_int64, a.with_z, a.score, a.workspace, a.tokens, a.num_experts, bytes > 0);
  });
  launch("router_losses_total", router_losses_total_kernel, {1, kWarp}, stream, a.workspace, blocks, a.tokens,
         a.num_experts, a.dtype == DType::kFloat64, a.balance, a.z);
}

void router_losses_backward(const RouterLossesBackwardArguments& a, void* stream) {
  const int64_t blocks = ceil_div(a.tokens, kBackwardThreads / kSumLanes);
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    const int64_t bytes = table_bytes<accumulate_t<T>>(a.load, a.num_experts);
    launch("router_losses_backward", router_losses_backward_kernel<T>,
           {blocks, kBackwardThreads, max(bytes, kLeastBytes)}, stream, a.logits, a.load, a.load_is_int64, a.with_z,
           a.score, a.grad_balance, a.grad_z, a.grad_logits, a.tokens, a.num_experts, bytes > 0);
  });
}

}  // namespace pymoe::cuda
