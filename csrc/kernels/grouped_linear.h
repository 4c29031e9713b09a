// grouped_linear: one linear layer per expert over rows that are sorted by expert, and its two gradients.
//
//     forward       y[r] = weight[e] @ x[r] + bias[e]      for rows offsets[e] <= r < offsets[e + 1]; (S, H) -> (S, N)
//     input grad    the forward of `grad` with the weight's last two strides exchanged, without bias
//     weight grad   dweight[e] = sum of grad[r] (outer) x[r] over the rows of e;                   -> (E, N, H)
//     bias grad     dbias[e] = sum of grad[r] over the rows of e;                                  -> (E, N)
//
// Rows past offsets[E] belong to no expert: their y is zero and their x and grad are never read. The gradients of an
// expert without rows are zero. Every element of the output is written; the outputs are contiguous, the inputs may
// have any strides (a stride is in elements).
//
// Sums are kept in fp32 (fp64 for fp64) and rounded once. The terms of an output element are added in an order that
// depends on the length of its sum alone: results are the same for any number of threads, and a row of y does not
// depend on the rows around it.
//
// `offsets` must start at 0, not decrease, and end within S. The CPU twin throws std::invalid_argument or
// std::out_of_range otherwise, before it touches any memory. Workspace: a few MiB a thread, kept between calls.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace pymoe {

struct MatrixView {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
};

struct GroupedLinearArguments {
  MatrixView x;             // (S, H)
  MatrixView weight;        // (N, H) of expert 0
  int64_t weight_stride;    // from one expert's weight to the next
  MatrixView bias;          // (E, N); data may be null
  const int32_t* offsets;   // (E + 1,)
  void* y;                  // (S, N)
  int64_t rows;             // S
  int64_t input_features;   // H
  int64_t output_features;  // N
  int64_t experts;          // E
  DType dtype;              // of every tensor
};

struct GroupedWeightGradArguments {
  MatrixView grad;         // (S, N)
  MatrixView x;            // (S, H)
  const int32_t* offsets;  // (E + 1,)
  void* weight_grad;       // (E, N, H)
  int64_t rows;
  int64_t input_features;
  int64_t output_features;
  int64_t experts;
  DType dtype;
};

struct GroupedBiasGradArguments {
  MatrixView grad;         // (S, N)
  const int32_t* offsets;  // (E + 1,)
  void* bias_grad;         // (E, N)
  int64_t rows;
  int64_t output_features;
  int64_t experts;
  DType dtype;
};

namespace cpu {
void grouped_linear(const GroupedLinearArguments& arguments);
void grouped_linear_weight_grad(const GroupedWeightGradArguments& arguments);
void grouped_linear_bias_grad(const GroupedBiasGradArguments& arguments);
}  // namespace cpu

}  // namespace pymoe
