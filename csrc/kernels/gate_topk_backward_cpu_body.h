// The inner loops of gate_topk_backward for one instruction set; see kernels/cpu/for_each_isa.h.
//
// With s the scores, c the chosen experts, g = grad * scale, S = sum of the chosen scores, d_i the gradient of s_i:
//
//     d_i = g_i                                  not renormalised, i chosen
//     d_i = (g_i - sum_c g s / S) / S            renormalised, i chosen; without the sum if S is floored
//     d_i = 0                                    i not chosen
//     softmax: grad_i = s_i (d_i - sum_c s d)    sigmoid: grad_i = d_i s_i (1 - s_i)
//
// For a renormalised softmax that is not floored, sum_c s d is 0, so the gradient is 0 except for the chosen experts,
// and s_i / S needs only their exponentials.

#include "kernels/cpu/score_rows.h"

namespace pymoe::cpu::PYMOE_ISA {

template <typename S>
struct ChosenScratch {
  S* scores;  // (E,)
  S* grad;    // (E,)
  S* chosen;  // (K,) scores of the chosen
  S* delta;   // (K,) gradients of these scores
};

// Turns the gradients of the weights into gradients of the chosen scores, in place. Returns the sum over the choices of
// score times gradient.
template <typename S>
PYMOE_INLINE S chosen_gradients(const GateOptions& options, int64_t choices, const S* chosen, S* delta) {
  S divisor = 1, inner = 0;
  if (options.renormalize) {
    const S sum = sum_in_blocks(chosen, choices);
    divisor = floored_sum(sum);
    if (!(sum < static_cast<S>(kScoreSumFloor))) {
      for (int64_t j = 0; j < choices; ++j) inner += delta[j] * (chosen[j] / divisor);
    }
  }
  S through = 0;
  for (int64_t j = 0; j < choices; ++j) {
    delta[j] = (delta[j] - inner) / divisor;
    through += chosen[j] * delta[j];
  }
  return through;
}

template <typename T, typename Out>
void softmax_backward(const GateTopkBackwardArguments& a, const T* row, const int32_t* experts, Out* out,
                      const ChosenScratch<accumulate_t<T>>& scratch) {
  using S = accumulate_t<T>;
  if (a.options.renormalize && a.chosen_on_logits) {
    const S greatest = to_accumulate(row[experts[0]]);
    for (int64_t j = 0; j < a.choices; ++j) {
      scratch.chosen[j] = exp_in_fixed_steps(to_accumulate(row[experts[j]]) - greatest);
    }
    const S sum = sum_in_blocks(scratch.chosen, a.choices);
    S inner = 0;
    for (int64_t j = 0; j < a.choices; ++j) inner += scratch.delta[j] * (scratch.chosen[j] / sum);
    // Write the gradient of experts that are not chosen: 0, or NaN if the token's scores are NaN, because a NaN must
    // not be hidden.
    const Out rest = round_to<Out>(sum * S{0});
    for (int64_t i = 0; i < a.num_experts; ++i) out[i] = rest;
    for (int64_t j = 0; j < a.choices; ++j) {
      out[experts[j]] = round_to<Out>((scratch.delta[j] - inner) * (scratch.chosen[j] / sum));
    }
    return;
  }
  softmax_row(widened_row(row, a.num_experts, scratch.grad), a.num_experts, scratch.scores);
  for (int64_t j = 0; j < a.choices; ++j) scratch.chosen[j] = scratch.scores[experts[j]];
  const S through = chosen_gradients(a.options, a.choices, scratch.chosen, scratch.delta);
  for (int64_t i = 0; i < a.num_experts; ++i) scratch.grad[i] = scratch.scores[i] * (S{0} - through);
  for (int64_t j = 0; j < a.choices; ++j) scratch.grad[experts[j]] = scratch.chosen[j] * (scratch.delta[j] - through);
  store_row(out, scratch.grad, a.num_experts);
}

template <typename T, typename Out>
void sigmoid_backward(const GateTopkBackwardArguments& a, const T* row, const int32_t* experts, Out* out,
                      const ChosenScratch<accumulate_t<T>>& scratch) {
  using S = accumulate_t<T>;
  for (int64_t j = 0; j < a.choices; ++j) {
    scratch.chosen[j] = sigmoid_in_fixed_steps(to_accumulate(row[experts[j]]));
  }
  chosen_gradients(a.options, a.choices, scratch.chosen, scratch.delta);
  for (int64_t i = 0; i < a.num_experts; ++i) {
    const S logit = to_accumulate(row[i]);
    out[i] = round_to<Out>(logit != logit ? logit : S{0});
  }
  for (int64_t j = 0; j < a.choices; ++j) {
    const S score = scratch.chosen[j];
    out[experts[j]] = round_to<Out>(scratch.delta[j] * (S{1} - score) * score);
  }
}

void gate_backward_tokens(const GateTopkBackwardArguments& a, int64_t begin, int64_t end, double* memory) {
  visit_gate_backward(a, [&]<typename T, typename Out>(TypeTag<T>, TypeTag<Out>) {
    using S = accumulate_t<T>;
    S* scores = reinterpret_cast<S*>(memory);
    S* grad = scores + a.num_experts;
    const ChosenScratch<S> scratch{scores, grad, grad + a.num_experts, grad + a.num_experts + a.choices};
    const S scale = static_cast<S>(a.options.scale);
    for (int64_t token = begin; token < end; ++token) {
      const T* row = static_cast<const T*>(a.logits) + token * a.num_experts;
      const int32_t* experts = a.experts + token * a.choices;
      const S* grad_weights = static_cast<const S*>(a.grad_weights) + token * a.choices;
      for (int64_t j = 0; j < a.choices; ++j) {
        if (experts[j] < 0 || experts[j] >= a.num_experts) {
          throw_bad_expert("gate_topk_backward", a.num_experts, experts[j], token * a.choices + j, a.choices);
        }
        scratch.delta[j] = grad_weights[j] * scale;
      }
      Out* out = static_cast<Out*>(a.grad_logits) + token * a.num_experts;
      if (a.options.score == Score::kSoftmax) {
        softmax_backward(a, row, experts, out, scratch);
      } else {
        sigmoid_backward(a, row, experts, out, scratch);
      }
    }
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
