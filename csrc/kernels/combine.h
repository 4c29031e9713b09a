// combine: the weighted sum of every token's rows, and its gradients.
//
//     out[t] = round(sum over k, in order, of weights[t, k] * y[slot[t, k]])
//
// Sums are kept in fp32 (fp64 for fp64) and start at +0; product and addition are rounded separately; a choice with
// slot -1 adds nothing. Every element has this one order, so a result depends neither on the instruction set nor on
// the number of threads. One pass: K rows are read and one is written, no (T, K, H) temporary.
//
// combine_backward, in one pass over y and grad:
//
//     dy[slot[t, k]] = round(weights[t, k] * grad[t]);  dy[s] = 0 for s >= *used
//     dweights[t, k] = <grad[t], y[slot[t, k]]>;  0 where the slot is -1
//
// The inner product is kept in 32 interleaved partial sums, element h in sum h % 32, which are added as a balanced
// tree: one order for every instruction set.
//
// Slots must hold -1 or a row in [0, S). The CPU twin throws std::out_of_range otherwise; a CUDA twin skips such a
// choice. Neither touches memory outside the tensors. Row offsets are 64-bit. No workspace.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace pymoe {

struct CombineArguments {
  const void* y;        // (S, H), S = T * K
  const int32_t* slot;  // (T, K)
  const void* weights;  // (T, K) in accumulate type, or null: every weight is one
  void* out;            // (T, H)
  int64_t tokens;       // T
  int64_t choices;      // K
  int64_t hidden;       // H
  DType dtype;          // of y and out
};

struct CombineBackwardArguments {
  const void* grad;     // (T, H)
  const void* y;        // (S, H); read for dweights only
  const int32_t* slot;  // (T, K)
  const int32_t* used;  // one value: the number of rows in use, offsets[E]
  const void* weights;  // (T, K) in accumulate type; read for dy only
  void* dy;             // (S, H), or null: not asked for
  void* dweights;       // (T, K) in accumulate type, or null: not asked for
  int64_t tokens;       // T
  int64_t choices;      // K
  int64_t hidden;       // H
  DType dtype;          // of grad, y and dy
};

namespace cpu {
void combine(const CombineArguments& arguments);
void combine_backward(const CombineBackwardArguments& arguments);
}  // namespace cpu

}  // namespace pymoe
