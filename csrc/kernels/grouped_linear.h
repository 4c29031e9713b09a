// grouped_linear: one linear layer per expert over rows that are sorted by expert, and its two gradients.
//
//     forward       y[r] = weight[e] @ x[r] + bias[e]      for rows offsets[e] <= r < offsets[e + 1]; (S, H) -> (S, N)
//     input grad    the forward of `grad` with the weight's last two strides exchanged, without bias
//     weight grad   dweight[e] = sum of grad[r] (outer) x[r] over the rows of e;                   -> (E, N, H)
//     bias grad     dbias[e] = sum of grad[r] over the rows of e;                                  -> (E, N)
//
// Rows past offsets[E] have no expert: their y is zero and their x and grad are never read. The gradients of an
// expert without rows are zero. Every element of the output is written; the outputs are contiguous, the inputs may
// have any strides (a stride is in elements).
//
// With an order, the rows need not be sorted in memory: the r-th sorted row is row order[r] of x, y and grad. The rules
// for rows past offsets[E] then apply to the rows that the first offsets[E] elements of the order do not name; its
// other elements are not read. The named rows must be distinct, and x and grad must be contiguous. The results have the
// same bits as for sorted rows: sums over an expert's rows run in the given order.
//
// Sums are kept in fp32 (fp64 for fp64) and rounded once. The terms of an output element are added in an order that
// depends only on the length of its sum and on the operands' strides: results are the same for any number of threads,
// and a row of y does not depend on the rows around it. (If torch's grouped GEMM makes the product,
// ops/torch_grouped_mm.h, the order is torch's.) With the instruction sets v4_bf16 and amx (cpu/isa.h), the CPU twin
// treats subnormal operands in bf16, and sums of their products that would be subnormal, as zero.
//
// `offsets` must start at 0, not decrease, and not exceed S; `order` must name rows in [0, S), none twice. Otherwise
// the CPU twin throws std::invalid_argument or std::out_of_range before it accesses any row. The CUDA twin, which reads
// nothing on the host, takes 0 for the first offset, the greatest earlier offset for one that decreases, and S for one
// above S; it skips elements of an order that name no row. It never reads or writes a row outside [0, S), and the rows
// of experts with correct offsets are correct, unless the order names them twice. With a wrong order, some rows of y
// may not be written.
//
// Memory: the CPU twin keeps a few MiB per thread between calls; the CUDA twin works in `workspace`.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace pymoe {

struct MatrixView {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
};

// The common arguments of the forward and of both gradients.
struct GroupedArguments {
  const int32_t* offsets;          // (E + 1,)
  void* out;                       // y (S, N), the gradient of the weight (E, N, H) or of the bias (E, N)
  int64_t rows;                    // S
  int64_t input_features;          // H; unused for the gradient of the bias
  int64_t output_features;         // N
  int64_t experts;                 // E, below 2^30
  DType dtype;                     // of every tensor
  int32_t* workspace;              // cuda::grouped_linear_workspace(E) values of any content; unused on the CPU
  const int32_t* order = nullptr;  // (S,), or null: rows are sorted
};

struct GroupedLinearArguments : GroupedArguments {
  MatrixView x;           // (S, H)
  MatrixView weight;      // (N, H) of expert 0
  int64_t weight_stride;  // stride from one expert's weight to the next
  MatrixView bias;        // (E, N); data may be null
};

struct GroupedWeightGradArguments : GroupedArguments {
  MatrixView grad;  // (S, N)
  MatrixView x;     // (S, H)
};

struct GroupedBiasGradArguments : GroupedArguments {
  MatrixView grad;  // (S, N)
};

namespace cpu {
void grouped_linear(const GroupedLinearArguments& arguments);
void grouped_linear_weight_grad(const GroupedWeightGradArguments& arguments);
void grouped_linear_bias_grad(const GroupedBiasGradArguments& arguments);
}  // namespace cpu

namespace cuda {
constexpr int64_t grouped_linear_workspace(int64_t experts) { return 2 * (experts + 1); }
void grouped_linear(const GroupedLinearArguments& arguments, void* stream);
void grouped_linear_weight_grad(const GroupedWeightGradArguments& arguments, void* stream);
void grouped_linear_bias_grad(const GroupedBiasGradArguments& arguments, void* stream);

// Steps before and after a product that another grouped GEMM computes. plan_ writes the plan to the workspace; the plan
// begins with E + 1 offsets that are safe to use whatever `offsets` contains. complete_ writes zeros to the rows
// without an expert, or to the gradients of experts without rows; it needs the plan in the workspace. The product must
// be bf16, contiguous and 16-byte aligned, with rows of a multiple of 16 bytes. No bias is added here: layers pass it
// to the operator that follows.
void plan_grouped_linear(const GroupedArguments& arguments, void* stream);
void complete_grouped_linear(const GroupedLinearArguments& arguments, void* stream);
void complete_grouped_weight_grad(const GroupedWeightGradArguments& arguments, void* stream);
// Returns ten times the major compute capability of a device plus the minor one, such as 90; if kernels are emulated,
// that of the emulated GPU. (It asks the CUDA runtime, without waiting for the device.)
int compute_capability(int device);
}  // namespace cuda

}  // namespace pymoe
