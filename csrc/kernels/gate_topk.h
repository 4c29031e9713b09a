// gate_topk: scores, choice of experts, weights and load in one pass over the logits; and its backward.
//
// Contract: pymoe/reference/gate_topk.py. The choice is made on integer keys (core/order.h). With neither bias nor
// groups they are the keys of the logits, and renormalised softmax scores need K exponentials per token:
// the weights are e^(l - l_best) over their sum. Otherwise they are the keys of score(logit) + bias, where the scores
// are computed in the fixed steps of core/score.h. In both cases `experts` and `load` are exact, for every instruction
// set and any number of threads; weights agree with the reference within a few ulp.
//
// The backward recomputes scores from the logits. It checks every index: for an expert outside [0, E) the CPU twin
// throws std::out_of_range, and the CUDA twin ignores the choice. So neither touches memory outside the tensors. A NaN
// logit gets a NaN gradient, and with softmax makes all gradients of its token NaN.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/score.h"
#include "kernels/choice_counts.h"

namespace pymoe {

// Below, "accumulated dtype" means float64 if the logits are float64, otherwise float32.
struct GateOptions {
  Score score;
  bool renormalize;
  double scale;
};

struct GateTopkArguments {
  DType dtype;          // of logits
  const void* logits;   // (T, E)
  const void* bias;     // (E,) accumulated dtype, or null
  void* weights;        // (T, K) accumulated dtype
  int32_t* experts;     // (T, K)
  int32_t* load;        // (E,)
  int64_t tokens;       // T
  int64_t num_experts;  // E >= 1
  int64_t choices;      // K, 1 <= K <= E
  int64_t num_groups;   // 0: no groups; else divides E
  int64_t topk_groups;  // topk_groups * (E / num_groups) >= K
  GateOptions options;
  // Only the CUDA twin uses the members from here on. Results do not depend on the number of blocks.
  void* workspace = nullptr;  // cuda::gate_topk_workspace bytes
  int64_t most_blocks = 0;    // maximum number of blocks in the grid; 0: the twin chooses
  ChoiceCounts counts{};      // if it has memory, counts are written instead of `load`, which need not be cleared

  PYMOE_HOST_DEVICE bool chooses_on_logits() const { return bias == nullptr && num_groups == 0; }
};

struct GateTopkBackwardArguments {
  DType dtype;               // dtype of logits and, unless `narrow`, of grad_logits
  const void* logits;        // (T, E)
  const int32_t* experts;    // (T, K)
  const void* grad_weights;  // (T, K) accumulated dtype
  void* grad_logits;         // (T, E)
  int64_t tokens;
  int64_t num_experts;
  int64_t choices;        // K >= 1
  bool chosen_on_logits;  // true: the best expert is among the chosen, so renormalising needs no floor or full softmax
  GateOptions options;
  void* workspace = nullptr;  // cuda::gate_topk_backward_workspace bytes, for the CUDA twin
  bool narrow = false;        // logits are float32, and gradients are rounded to bf16 for a later product
};

// Calls f(TypeTag of the logits, TypeTag of their gradients).
template <typename F>
void visit_gate_backward(const GateTopkBackwardArguments& a, F&& f) {
  if (a.narrow) return f(TypeTag<float>{}, TypeTag<BFloat16>{});
  visit_dtype(a.dtype, [&](auto type) { f(type, type); });
}

namespace cpu {
void gate_topk(const GateTopkArguments& arguments);
void gate_topk_backward(const GateTopkBackwardArguments& arguments);
}  // namespace cpu

namespace cuda {
// Return the number of bytes of workspace that a call needs: none in usual shapes, whose rows fit into shared memory.
int64_t gate_topk_workspace(const GateTopkArguments& arguments);
int64_t gate_topk_backward_workspace(const GateTopkBackwardArguments& arguments);
// Returns the layout of the counts that a call can write for build_routing; memory for them is not allocated. The
// layout has no tiles if the call cannot write counts.
ChoiceCounts gate_topk_counts(const GateTopkArguments& arguments);
// Enqueue on `stream` (a cudaStream_t) and return immediately; throw std::runtime_error if a launch is refused.
void gate_topk(const GateTopkArguments& arguments, void* stream);
void gate_topk_backward(const GateTopkBackwardArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
