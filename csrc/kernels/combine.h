// combine: the weighted sum of every token's rows, and its gradients.
//
//     out[t] = round(sum over k, in order, of weights[t, k] * y[slot[t, k]])
//
// Sums are kept in fp32 (fp64 for fp64) and start at +0; product and addition are rounded separately; a choice with
// slot -1 adds nothing. The order is the same for every element, so a result depends neither on the instruction set nor
// on the number of threads. For each token, K rows are read and one is written, without a (T, K, H) temporary.
//
// With biases, y[s] is replaced by y[s] + bias[e] for the expert e that owns row s (core/expert_of_row.h); this sum is
// not rounded, and a row without an expert gets no bias. The CPU twin checks the offsets as grouped_linear does. If the
// offsets break their contract, the CUDA twin may add the bias of any expert, but accesses no memory outside the
// tensors.
//
// combine_backward, in one pass over y and grad:
//
//     dy[slot[t, k]] = round(weights[t, k] * grad[t]);  dy[s] = 0 for s >= *used
//     dweights[t, k] = <grad[t], y[slot[t, k]]>;  0 where the slot is -1
//
// The CPU twin keeps the inner product in 32 interleaved partial sums, element h in sum h % 32, which are added as a
// balanced tree: one order for every instruction set. The CUDA twin has another fixed order, which depends only on H
// and the dtype (combine_backward_cuda.cu): the dweights of both twins agree within rounding; out and dy have the same
// bits.
//
// Every slot must be -1, or a row in [0, S) that no other slot names; for the backward, the row must also be below
// *used. The CPU twin throws std::out_of_range for a slot outside [-1, S); the CUDA twin skips such a choice (nothing
// is added, its dweight is 0). For any slots and *used, neither touches memory outside the tensors and, unless it
// throws, every element of out and dweights is written. A row of dy below *used that no slot names is not written. Each
// element of a row that two slots name comes from the gradient of either. Rows from *used on are 0 even if a slot names
// them. Row offsets are 64-bit.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/expert_of_row.h"

namespace pymoe {

// The common arguments of forward and backward.
struct CombineInput {
  const void* y;          // (S, H); read by the backward for dweights only
  const int32_t* slot;    // (T, K)
  const void* weights;    // (T, K) in accumulate type; null (forward only): all are 1; the backward reads them for dy
  int64_t tokens;         // T
  int64_t choices;        // K
  int64_t rows;           // S; T * K or any other number
  int64_t hidden;         // H
  DType dtype;            // dtype of everything except weights and dweights
  ExpertBiases biases{};  // as wide as y; read by the backward for dweights only
};

struct CombineArguments : CombineInput {
  void* out;  // (T, H)
};

struct CombineBackwardArguments : CombineInput {
  const void* grad;     // (T, H)
  const int32_t* used;  // one value: offsets[E], the number of rows in use
  void* dy;             // (S, H), or null if not needed
  void* dweights;       // (T, K) in accumulate type, or null if not needed
};

namespace cpu {
void combine(const CombineArguments& arguments);
void combine_backward(const CombineBackwardArguments& arguments);
}  // namespace cpu

namespace cuda {
void combine(const CombineArguments& arguments, void* stream);
void combine_backward(const CombineBackwardArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
