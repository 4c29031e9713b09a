#include "kernels/expert_activation.h"

#include <algorithm>

#include "kernels/cpu/checked_offsets.h"
#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

// The biases of a strip: the elements that are added to x and to up. A null pointer with `added` stands for zeros,
// which are added to rows without an expert.
template <typename T>
struct StripBiases {
  bool added = false;
  const T* x = nullptr;
  const T* up = nullptr;
};

}  // namespace
}  // namespace pymoe::cpu

#define PYMOE_ISA_BODY "kernels/expert_activation_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {
namespace {

// Calls body(row, first, count) for strips of rows that together cover the (rows, features) output. Unless `apart` is
// true, all rows count as one long row.
template <typename Body>
void for_each_strip(int64_t rows, int64_t features, bool apart, const Body& body) {
  constexpr int64_t kStrip = 4096;
  if (!apart) {
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

// Returns the biases for the strip of `row` that begins at column `first`. With interleaved biases, `x` points to both.
template <typename T>
StripBiases<T> biases_for(const ExpertActivationArguments& a, int64_t row, int64_t first) {
  if (a.biases.data == nullptr) return {};
  const bool gated = is_gated(a.kind);
  const T* bias = bias_of_row<T>(a.biases, row, a.features * (gated ? 2 : 1));
  if (bias == nullptr) return {true};
  if (a.interleaved) return {true, bias + 2 * first};
  return {true, bias + first, gated ? bias + a.features + first : nullptr};
}

template <Activation kind, typename T>
void forward(const ExpertActivationArguments& a) {
  constexpr bool gated = is_gated(kind);
  constexpr int kParts = gated ? 2 : 1;
  const bool biased = a.biases.data != nullptr;
  const auto clamp = clamp_of<accumulate_t<T>>(a);
  const T* h = static_cast<const T*>(a.h);
  T* out = static_cast<T*>(a.out);
  if constexpr (kind == Activation::kClampedSwiglu) {
    if (a.interleaved) {
      const auto activate = PYMOE_SELECT_ISA(activate_pairs<kind, T>);
      for_each_strip(a.rows, a.features, biased, [&](int64_t row, int64_t first, int64_t count) {
        const int64_t place = row * a.features + first;
        activate(h + 2 * place, out + place, count, clamp, biases_for<T>(a, row, first));
      });
      return;
    }
  }
  const auto activate = PYMOE_SELECT_ISA(activate_strip<kind, T>);
  for_each_strip(a.rows, a.features, gated || biased, [&](int64_t row, int64_t first, int64_t count) {
    const T* x = h + row * kParts * a.features + first;
    activate(x, gated ? x + a.features : nullptr, out + row * a.features + first, count, clamp,
             biases_for<T>(a, row, first));
  });
}

template <Activation kind, typename T>
void backward(const ExpertActivationArguments& a) {
  constexpr bool gated = is_gated(kind);
  constexpr int kParts = gated ? 2 : 1;
  const bool biased = a.biases.data != nullptr;
  const auto clamp = clamp_of<accumulate_t<T>>(a);
  const T* grad = static_cast<const T*>(a.grad);
  const T* h = static_cast<const T*>(a.h);
  T* grad_h = static_cast<T*>(a.out);
  if constexpr (kind == Activation::kClampedSwiglu) {
    if (a.interleaved) {
      const auto differentiate = PYMOE_SELECT_ISA(differentiate_pairs<kind, T>);
      for_each_strip(a.rows, a.features, biased, [&](int64_t row, int64_t first, int64_t count) {
        const int64_t place = row * a.features + first;
        differentiate(grad + place, h + 2 * place, grad_h + 2 * place, count, clamp, biases_for<T>(a, row, first));
      });
      return;
    }
  }
  const auto differentiate = PYMOE_SELECT_ISA(differentiate_strip<kind, T>);
  for_each_strip(a.rows, a.features, gated || biased, [&](int64_t row, int64_t first, int64_t count) {
    const T* x = h + row * kParts * a.features + first;
    T* grad_x = grad_h + row * kParts * a.features + first;
    differentiate(grad + row * a.features + first, x, gated ? x + a.features : nullptr, grad_x,
                  gated ? grad_x + a.features : nullptr, count, clamp, biases_for<T>(a, row, first));
  });
}

void check_biases(const ExpertActivationArguments& a) {
  if (a.biases.data != nullptr) check_offsets("expert_activation", a.biases.offsets, a.biases.experts, a.rows);
}

}  // namespace

void expert_activation(const ExpertActivationArguments& arguments) {
  check_biases(arguments);
  visit_kind(arguments.kind, [&](auto kind) {
    visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { forward<kind(), T>(arguments); });
  });
}

void expert_activation_backward(const ExpertActivationArguments& arguments) {
  check_biases(arguments);
  visit_kind(arguments.kind, [&](auto kind) {
    visit_dtype(arguments.dtype, [&]<typename T>(TypeTag<T>) { backward<kind(), T>(arguments); });
  });
}

}  // namespace pymoe::cpu
