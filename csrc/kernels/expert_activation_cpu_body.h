// The loops of expert_activation, compiled once per instruction set (see expert_activation.h): the steps of
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

template <typename T>
PYMOE_INLINE vector_t<T> load_biased(const T* values, bool added, const T* biases, int64_t i, int count) {
  const vector_t<T> value = load_count(values + i, count);
  if (!added) return value;
  return value + (biases == nullptr ? vector_t<T>{} : load_count(biases + i, count));
}

template <Activation kind, typename T>
void activate_strip(const T* x, const T* up, T* out, int64_t size, const SwigluClamp<accumulate_t<T>>& clamp,
                    const StripBiases<T>& biases) {
  for_vectors<T>(size, [&](int64_t i, int count) {
    const vector_t<T> value = load_biased(x, biases.added, biases.x, i, count);
    const vector_t<T> other = is_gated(kind) ? load_biased(up, biases.added, biases.up, i, count) : value;
    store_count(out + i, activate<kind>(value, other, clamp), count);
  });
}

template <Activation kind, typename T>
void differentiate_strip(const T* grad, const T* x, const T* up, T* grad_x, T* grad_up, int64_t size,
                         const SwigluClamp<accumulate_t<T>>& clamp, const StripBiases<T>& biases) {
  for_vectors<T>(size, [&](int64_t i, int count) {
    const vector_t<T> value = load_biased(x, biases.added, biases.x, i, count);
    const vector_t<T> other = is_gated(kind) ? load_biased(up, biases.added, biases.up, i, count) : value;
    vector_t<T> of_other{};
    store_count(grad_x + i, differentiate<kind>(load_count(grad + i, count), value, other, of_other, clamp), count);
    if constexpr (is_gated(kind)) store_count(grad_up + i, of_other, count);
  });
}

// The number of interleaved (gate, up) pairs that are processed at once. The functions below split them into arrays of
// gate and up on the stack, which stay in the L1 cache; the backward pass interleaves the gradients again.
inline constexpr int64_t kPairs = 512;

template <typename T>
void split_pairs(const T* pairs, int64_t count, T* x, T* up) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = pairs[2 * i];
    up[i] = pairs[2 * i + 1];
  }
}

// Splits the interleaved biases of `count` pairs, from pair `first` on, into the arrays x and up, and returns these. If
// there are no biases, returns `of_pairs` unchanged.
template <typename T>
StripBiases<T> split_biases(const StripBiases<T>& of_pairs, int64_t first, int64_t count, T* x, T* up) {
  if (of_pairs.x == nullptr) return of_pairs;
  split_pairs(of_pairs.x + 2 * first, count, x, up);
  return {true, x, up};
}

template <Activation kind, typename T>
void activate_pairs(const T* pairs, T* out, int64_t size, const SwigluClamp<accumulate_t<T>>& clamp,
                    const StripBiases<T>& biases) {
  T x[kPairs], up[kPairs], bias_x[kPairs], bias_up[kPairs];
  for (int64_t first = 0; first < size; first += kPairs) {
    const int64_t count = std::min(kPairs, size - first);
    split_pairs(pairs + 2 * first, count, x, up);
    activate_strip<kind>(x, up, out + first, count, clamp, split_biases(biases, first, count, bias_x, bias_up));
  }
}

template <Activation kind, typename T>
void differentiate_pairs(const T* grad, const T* pairs, T* grad_pairs, int64_t size,
                         const SwigluClamp<accumulate_t<T>>& clamp, const StripBiases<T>& biases) {
  T x[kPairs], up[kPairs], grad_x[kPairs], grad_up[kPairs], bias_x[kPairs], bias_up[kPairs];
  for (int64_t first = 0; first < size; first += kPairs) {
    const int64_t count = std::min(kPairs, size - first);
    split_pairs(pairs + 2 * first, count, x, up);
    differentiate_strip<kind>(grad + first, x, up, grad_x, grad_up, count, clamp,
                              split_biases(biases, first, count, bias_x, bias_up));
    for (int64_t i = 0; i < count; ++i) {
      grad_pairs[2 * (first + i)] = grad_x[i];
      grad_pairs[2 * (first + i) + 1] = grad_up[i];
    }
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
