// expert_activation: the element-wise middle of an expert, fused forward and fused backward.
//
//     swiglu   h (S, 2F) = [gate | up]    out = silu(gate) * up          silu(x) = x / (1 + e^-x)
//     gelu     h (S, F)                   out = h * Phi(h)               Phi: the normal distribution function
//     relu     h (S, F)                   out = h where h > 0 or NaN, else 0
//
// The backward recomputes from h. Everything in fp32 (fp64 for fp64), rounded once; NaN stays NaN. All tensors are
// contiguous. An element depends on its own inputs alone, so results are the same for any number of threads.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace pymoe {

enum class Activation : int8_t { kSwiglu, kGelu, kRelu };

struct ExpertActivationArguments {
  const void* h;     // (S, 2F) for swiglu, else (S, F)
  void* out;         // (S, F)
  int64_t rows;      // S
  int64_t features;  // F
  Activation kind;
  DType dtype;
};

struct ExpertActivationBackwardArguments {
  const void* grad;  // (S, F)
  const void* h;     // as in the forward
  void* grad_h;      // as h
  int64_t rows;
  int64_t features;
  Activation kind;
  DType dtype;
};

namespace cpu {
void expert_activation(const ExpertActivationArguments& arguments);
void expert_activation_backward(const ExpertActivationBackwardArguments& arguments);
}  // namespace cpu

}  // namespace pymoe
