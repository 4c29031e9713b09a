// router_losses: the balancing loss and the z-loss of a router, in one pass over its logits; and their backward.
//
//     balance = E / T * sum_t <f, p_t>      f_e = load_e / max(sum load, 1), p_t the probabilities of token t
//     z       = 1 / T * sum_t lse_t^2       lse_t = logsumexp of the logits of token t
//
// Contract: pymoe/reference/router_losses.py. Sums over tokens run over blocks of kLossBlock tokens: in the accumulated
// dtype and in order within a block, in fp64 and in kSumLanes lanes (like sums over experts, core/score.h) over blocks.
// So the result is the same for any number of threads and for both twins, except that the logarithms of their libraries
// may differ in the last bit. The backward recomputes the probabilities and writes each gradient once:
//
//     softmax: grad = p_te * (a (f_e - <f, p_t>) + b lse_t)    a = grad_balance * E / T, b = 2 * grad_z / T
//     sigmoid: the first part is a (f_e - <f, p_t>) s (1 - s) / S, with S the sum of the token's scores s; if S is
//              floored, <f, p_t> is omitted
//
// `load` may contain any values: its sum may wrap, and they are not used as indices.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/score.h"

namespace pymoe {

inline constexpr int64_t kLossBlock = 64;

// Returns the number of doubles that the forward needs as a workspace: two sums per block of tokens.
constexpr int64_t router_losses_workspace(int64_t tokens) { return 2 * ((tokens + kLossBlock - 1) / kLossBlock); }

// The common arguments of forward and backward.
struct RouterLossesInput {
  DType dtype;          // dtype of logits and their gradients
  const void* logits;   // (T, E)
  int64_t tokens;       // T
  int64_t num_experts;  // E >= 1
  const void* load;     // (E,) int32 or int64; null: no balancing loss
  bool load_is_int64;
  bool with_z;
  Score score;
};

struct RouterLossesArguments : RouterLossesInput {
  void* balance;      // one value, accumulated dtype; 0 without load
  void* z;            // one value, accumulated dtype; 0 without with_z
  double* workspace;  // router_losses_workspace(T) values; content irrelevant
};

struct RouterLossesBackwardArguments : RouterLossesInput {
  const void* grad_balance;  // one value, accumulated dtype
  const void* grad_z;        // one value, accumulated dtype
  void* grad_logits;         // (T, E)
};

namespace cpu {
void router_losses(const RouterLossesArguments& arguments);
void router_losses_backward(const RouterLossesBackwardArguments& arguments);
}  // namespace cpu

namespace cuda {
void router_losses(const RouterLossesArguments& arguments, void* stream);
void router_losses_backward(const RouterLossesBackwardArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
