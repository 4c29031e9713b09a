// The inner loops of router_losses for one instruction set; see kernels/cpu/for_each_isa.h.

#include "kernels/cpu/score_rows.h"

namespace pymoe::cpu::PYMOE_ISA {

// Statistics of one token's row. A score is e^(l - max) with softmax, and sigmoid(l) with sigmoid.
template <typename S>
struct RowStatistics {
  S max;                   // of the logits
  S sum;                   // of e^(l - max)
  S score_sum, score_dot;  // sums of the unnormalised scores, and of scores times f
};

// Returns the statistics of a row. `max` and `sum` are 0 if only sigmoid scores are needed, `score_dot` if `fraction`
// is null. Exponentials e^(l - max) that are computed are also written to `exps`, and sigmoid scores to `scores`;
// either may be null.
template <typename S>
RowStatistics<S> row_statistics(const S* row, int64_t size, Score score, bool with_z, const S* fraction, S* exps,
                                S* scores) {
  RowStatistics<S> result{};
  const auto add_up = [&](S past_end, S* target, const auto& score_of) {
    LaneSum<S> sum, dot;
    for_row(row, size, past_end, [&](vector_t<S> value, int64_t first, int count, int part) {
      vector_t<S> s = score_of(value);
      for (int lane = count; lane < kLanes<S>; ++lane) s[lane] = 0;
      if (target != nullptr) store_count(target + first, s, count);
      sum.add(s, part);
      if (fraction != nullptr) dot.add(s * load(fraction + first), part);
    });
    result.score_sum = sum.total();
    result.score_dot = dot.total();
  };
  const bool sigmoid_scores = fraction != nullptr && score == Score::kSigmoid;
  if (with_z || !sigmoid_scores) {
    const S max = max_of_row(row, size);
    add_up(-std::numeric_limits<S>::infinity(), exps, [&](vector_t<S> value) { return exp(value - max); });
    result.max = max;
    result.sum = result.score_sum;
  }
  if (sigmoid_scores) add_up(S{0}, scores, [&](vector_t<S> value) { return sigmoid(value); });
  return result;
}

// Writes the sum of <f, p> over one block's tokens to `balance`, and the sum of lse^2 to `z`. `fraction` has kSumLanes
// zeros after its E values, or is null. `scratch` has room for a row.
void router_losses_block(const RouterLossesArguments& a, const void* fraction, int64_t begin, int64_t end,
                         double* scratch, double* balance, double* z) {
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    using S = accumulate_t<T>;
    S balance_sum = 0, z_sum = 0;
    for (int64_t token = begin; token < end; ++token) {
      const S* row = widened_row(static_cast<const T*>(a.logits) + token * a.num_experts, a.num_experts,
                                 reinterpret_cast<S*>(scratch));
      const auto r =
          row_statistics<S>(row, a.num_experts, a.score, a.with_z, static_cast<const S*>(fraction), nullptr, nullptr);
      if (fraction != nullptr) {
        balance_sum += r.score_dot / (a.score == Score::kSigmoid ? floored_sum(r.score_sum) : r.score_sum);
      }
      if (a.with_z) {
        const S lse = logsumexp_of(r.max, r.sum, row, a.num_experts);
        z_sum += lse * lse;
      }
    }
    *balance = balance_sum;
    *z = z_sum;
  });
}

void router_losses_backward_range(const RouterLossesBackwardArguments& a, const void* fraction_values, int64_t begin,
                                  int64_t end, double* scratch) {
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    using S = accumulate_t<T>;
    const auto* fraction = static_cast<const S*>(fraction_values);
    const bool sigmoid_scores = fraction != nullptr && a.score == Score::kSigmoid;
    const int64_t padded = (a.num_experts + kSumLanes - 1) / kSumLanes * kSumLanes;
    S* exps = reinterpret_cast<S*>(scratch);
    S* scores = exps + padded;
    S* grad = scores + padded;
    const S tokens = static_cast<S>(a.tokens);
    const S of_balance =
        fraction == nullptr ? 0 : *static_cast<const S*>(a.grad_balance) * static_cast<S>(a.num_experts) / tokens;
    const S of_z = a.with_z ? 2 * *static_cast<const S*>(a.grad_z) / tokens : 0;
    for (int64_t token = begin; token < end; ++token) {
      const S* row = widened_row(static_cast<const T*>(a.logits) + token * a.num_experts, a.num_experts, grad);
      T* out = static_cast<T*>(a.grad_logits) + token * a.num_experts;
      const auto r = row_statistics<S>(row, a.num_experts, a.score, a.with_z, fraction, exps, scores);
      const S along_z = a.with_z ? of_z * (r.max + std::log(r.sum)) : 0;
      if (!sigmoid_scores) {
        const S mean = fraction == nullptr ? 0 : r.score_dot / r.sum;
        for_row(exps, a.num_experts, S{0}, [&](vector_t<S> e, int64_t first, int count, int) {
          vector_t<S> slope = broadcast(along_z);
          if (fraction != nullptr) slope += of_balance * (load(fraction + first) - mean);
          store_count(grad + first, e / r.sum * slope, count);
        });
      } else {
        const S divisor = floored_sum(r.score_sum);
        const bool floored = r.score_sum < static_cast<S>(kScoreSumFloor);
        const S mean = floored ? 0 : r.score_dot / divisor;
        for_row(scores, a.num_experts, S{0}, [&](vector_t<S> s, int64_t first, int count, int) {
          vector_t<S> value = of_balance * (load(fraction + first) - mean) / divisor * (1 - s) * s;
          if (a.with_z) value += load(exps + first) / r.sum * along_z;
          store_count(grad + first, value, count);
        });
      }
      store_row(out, grad, a.num_experts);
    }
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
