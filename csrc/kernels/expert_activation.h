// expert_activation: the element-wise function between an expert's two products, in fused forward and backward kernels.
//
//     swiglu   h (S, 2F) = [gate | up]    out = silu(gate) * up          silu(x) = x / (1 + e^-x)
//     gelu     h (S, F)                   out = h * Phi(h)               Phi: the normal distribution function
//     relu     h (S, F)                   out = h where h > 0 or NaN, else 0
//     geglu         h (S, 2F)             out = gelu(gate) * up
//     gelu_tanh     h (S, F)              out = h (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3))) / 2
//     geglu_tanh    h (S, 2F)             out = gelu_tanh(gate) * up
//     relu_squared  h (S, F)              out = relu(h)^2
//     clamped swiglu  h (S, 2F)           g = min(gate, limit), u = min(max(up, -limit), limit)
//                                         out = g / (1 + e^(-alpha g)) * (u + up_offset)
//
// With biases, h + bias[e] takes the place of h in every row, for the row's expert e (core/expert_of_row.h). This sum
// is not rounded. Its gradient is the gradient of h; summed over an expert's rows, it is the gradient of the expert's
// bias. A row without an expert gets zeros as its bias. The CPU twin checks the offsets as grouped_linear does. If the
// offsets break their contract, the CUDA twin may add the bias of any expert, but accesses no memory outside the
// tensors.
//
// Gate and up of the clamped swiglu may be interleaved: h = [gate 0, up 0, gate 1, up 1, ...]. A clamp has the gradient
// 0 outside of its limits and 1 on them.
//
// The backward recomputes from h. Everything is in fp32 (fp64 for fp64) and rounded once; NaN stays NaN. All tensors
// are contiguous. An element depends only on its own inputs, by the steps of core/activation.h, so results are the same
// for any number of threads and on the GPU. The exceptions are gelu and geglu in fp64, where the two libraries' erfc
// may differ in the last bits. There is no workspace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/activation.h"
#include "core/dtype.h"
#include "core/expert_of_row.h"

namespace pymoe {

struct ExpertActivationArguments {
  const void* grad;  // (S, F); only for the backward
  const void* h;     // (S, 2F) for gated kinds, else (S, F)
  void* out;         // (S, F); in the backward the gradient of h, with the shape of h
  int64_t rows;      // S
  int64_t features;  // F
  Activation kind;
  DType dtype;
  SwigluClamp<double> clamp{};  // parameters of the clamped swiglu
  bool interleaved = false;     // whether gate and up of the clamped swiglu are interleaved
  ExpertBiases biases{};        // as wide as h
};

// Returns the parameters in the type of the kernel's computation.
template <typename S>
SwigluClamp<S> clamp_of(const ExpertActivationArguments& a) {
  return {static_cast<S>(a.clamp.limit), static_cast<S>(a.clamp.alpha), static_cast<S>(a.clamp.up_offset)};
}

// Calls f with the kind as a compile-time constant.
template <typename F>
void visit_kind(Activation kind, F&& f) {
  switch (kind) {
    case Activation::kSwiglu: return f(std::integral_constant<Activation, Activation::kSwiglu>{});
    case Activation::kGelu: return f(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kRelu: return f(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kGeglu: return f(std::integral_constant<Activation, Activation::kGeglu>{});
    case Activation::kGegluTanh: return f(std::integral_constant<Activation, Activation::kGegluTanh>{});
    case Activation::kGeluTanh: return f(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kReluSquared: return f(std::integral_constant<Activation, Activation::kReluSquared>{});
    case Activation::kClampedSwiglu: return f(std::integral_constant<Activation, Activation::kClampedSwiglu>{});
  }
}

namespace cpu {
void expert_activation(const ExpertActivationArguments& arguments);
void expert_activation_backward(const ExpertActivationArguments& arguments);
}  // namespace cpu

namespace cuda {
void expert_activation(const ExpertActivationArguments& arguments, void* stream);
void expert_activation_backward(const ExpertActivationArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
