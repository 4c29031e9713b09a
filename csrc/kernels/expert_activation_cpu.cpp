#include "kernels/expert_activation.h"

#include <algorithm>

#include "kernels/cpu/parallel.h"

#define PYMOE_ISA_BODY "kernels/expert_activation_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {
namespace {

// Calls body(row, first, count) for strips of rows that together cover the (rows, features) output. Without a gate the
// rows are consecutive and form one long row.
template <typename Body>
void for_each_strip(int64_t rows, int64_t features, bool gated, const Body& body) {
  constexpr int64_t kStrip = 4096;
  if (!gated) {
    features *= rows;
    rows = 1;
  }
  if (rows == 0 || features == 0) return;
  const int64_t strips = (features + kStrip - 1) / kStrip;
  const int64_t grain = std::max<int64_t>(1, 2 * kStrip / std::min(features, kStrip));
  parallel_for(0, rows * strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % strips * kStrip;
      body(i / strips, first, std::min(kStrip, features - first));
    }
  });
}

template <Activation kind, typename T>
void forward(const ExpertActivationArguments& a) {
  constexpr bool gated = is_gated(kind);
  const auto clamp = clamp_of<accumulate_t<T>>(a);
  const T* h = static_cast<const T*>(a.h);
  T* out = static_cast<T*>(a.out);
  if constexpr (kind == Activation::kClampedSwiglu) {
    if (a.interleaved) {  // consecutive rows form one long row of pairs
      const auto activate = PYMOE_SELECT_ISA(activate_pairs<kind, T>);
      for_each_strip(a.rows, a.features, false, [&](int64_t, int64_t first, int64_t count) {
        activate(h + 2 * first, out + first, count, clamp);
      });
      return;
    }
  }
  const auto activate = PYMOE_SELECT_ISA(activate_strip<kind, T>);
  for_each_strip(a.rows, a.features, gated, [&](int64_t row, int64_t first, int64_t count) {
    const T* x = h + row * 2 * a.features + first;
    activate(x, gated ? x + a.features : nullptr, out + row * a.features + first, count, clamp);
  });
}

template <Activation kind, typename T>
void backward(const ExpertActivationArguments& a) {
  constexpr bool gated = is_gated(kind);
  const auto clamp = clamp_of<accumulate_t<T>>(a);
  const T* grad = static_cast<const T*>(a.grad);
  const T* h = static_cast<const T*>(a.h);
  T* grad_h = static_cast<T*>(a.out);
  if constexpr (kind == Activation::kClampedSwiglu) {
    if (a.interleaved) {
      const auto differentiate = PYMOE_SELECT_ISA(differentiate_pairs<kind, T>);
      for_each_strip(a.rows, a.features, false, [&](int64_t, int64_t first, int64_t count) {
        differentiate(grad + first, h + 2 * first, grad_h + 2 * first, count, clamp);
      });
      return;
    }
  }
  const auto differentiate = PYMOE_SELECT_ISA(differentiate_strip<kind, T>);
  for_each_strip(a.rows, a.features, gated, [&](int64_t row, int64_t first, int64_t count) {
    const T* x = h + row * 2 * a.features + first;
    T* grad_x = grad_h + row * 2 * a.features + first;
    differentiate(grad + row * a.features + first, x, gated ? x + a.features : nullptr, grad_x,
                  gated ? grad_x + a.features : nullptr, count, clamp);
  });
}

}  // namespace

void expert_activation(const ExpertActivationArguments& arguments) {
  visit_kind(arguments.kind, [&](auto kind) {
    visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { forward<kind(), T>(arguments); });
  });
}

void expert_activation_backward(const ExpertActivationArguments& arguments) {
  visit_kind(arguments.kind, [&](auto kind) {
    visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { backward<kind(), T>(arguments); });
  });
}

}  // namespace pymoe::cpu
