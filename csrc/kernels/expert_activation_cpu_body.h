// The loops of expert_activation, compiled once an instruction set (see expert_activation.h): the steps of
// core/activation_steps.h on vectors.

namespace pymoe::cpu::PYMOE_ISA {

template <typename Vector>
using element_t = std::remove_cvref_t<decltype(Vector{}[0])>;

template <typename Vector>
PYMOE_INLINE Vector exp_in_fixed_steps(Vector x) {
  return exp(x);
}

template <typename Vector>
PYMOE_INLINE Vector one_plus_exp(Vector x) {
  return 1 + exp(x);
}

PYMOE_INLINE vdouble normal_cdf(vdouble x, vdouble& gauss) {
  gauss = exp(x * x * -0.5);
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = 0.5 * std::erfc(x[lane] * kMinusInverseSqrt2);
  return x;
}

#include "core/activation_steps.h"

template <Activation kind, typename T>
void activate_strip(const T* x, const T* up, T* out, int64_t size) {
  for_vectors<T>(size, [&](int64_t i, int count) {
    const vector_t<T> value = load_count(x + i, count);
    const vector_t<T> other = kind == Activation::kSwiglu ? load_count(up + i, count) : value;
    store_count(out + i, activate<kind>(value, other), count);
  });
}

template <Activation kind, typename T>
void differentiate_strip(const T* grad, const T* x, const T* up, T* grad_x, T* grad_up, int64_t size) {
  constexpr bool kGated = kind == Activation::kSwiglu;
  for_vectors<T>(size, [&](int64_t i, int count) {
    const vector_t<T> value = load_count(x + i, count);
    const vector_t<T> other = kGated ? load_count(up + i, count) : value;
    vector_t<T> of_other{};
    store_count(grad_x + i, differentiate<kind>(load_count(grad + i, count), value, other, of_other), count);
    if constexpr (kGated) store_count(grad_up + i, of_other, count);
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
