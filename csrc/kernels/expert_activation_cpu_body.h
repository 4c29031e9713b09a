// The loops of expert_activation, compiled once an instruction set (see expert_activation.h).

namespace pymoe::cpu::PYMOE_ISA {

// Phi(x) = erfc(-x / sqrt 2) / 2. For fp32 the Chebyshev fit of erfc of Press et al., Numerical Recipes 6.2: its
// relative error is below 1.2e-7 everywhere, so Phi does not lose its lower tail, as 1 + erf(x / sqrt 2) does.
PYMOE_INLINE vfloat normal_cdf(vfloat x) {
  const vfloat scaled = x * 0.70710678f;
  const vfloat z = scaled < 0.0f ? -scaled : scaled;
  const vfloat t = 1.0f / (1.0f + 0.5f * z);
  vfloat p = t * 0.17087277f - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  const vfloat tail = 0.5f * t * exp(-z * z - 1.26551223f + t * p);
  return x > 0.0f ? 1.0f - tail : tail;
}

PYMOE_INLINE vdouble normal_cdf(vdouble x) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = 0.5 * std::erfc(x[lane] * -0.70710678118654752);
  return x;
}

template <typename Vector>
PYMOE_INLINE Vector normal_density(Vector x) {
  using S = decltype(x[0] + x[0]);
  return exp(x * x * S(-0.5)) * S(0.39894228040143268);
}

template <typename Vector>
PYMOE_INLINE Vector sigmoid(Vector x) {
  using S = decltype(x[0] + x[0]);
  return S(1) / (S(1) + exp(-x));
}

// One vector of results. `up` is read by swiglu alone.
template <Activation kind, typename Vector>
PYMOE_INLINE Vector activate(Vector x, Vector up) {
  using S = decltype(x[0] + x[0]);
  if constexpr (kind == Activation::kSwiglu) {
    return x / (S(1) + exp(-x)) * up;
  } else if constexpr (kind == Activation::kGelu) {
    return x * normal_cdf(x);
  } else {
    return x <= S(0) ? Vector{} : x;
  }
}

// One vector of gradients: of x (the gate, for swiglu), and of up into `grad_up`.
template <Activation kind, typename Vector>
PYMOE_INLINE Vector differentiate(Vector grad, Vector x, Vector up, Vector& grad_up) {
  using S = decltype(x[0] + x[0]);
  if constexpr (kind == Activation::kSwiglu) {
    const Vector gate = sigmoid(x);
    grad_up = grad * (x * gate);
    return grad * up * (gate * (S(1) + x * (S(1) - gate)));
  } else if constexpr (kind == Activation::kGelu) {
    return grad * (normal_cdf(x) + x * normal_density(x));
  } else {
    return x <= S(0) ? Vector{} : grad;
  }
}

template <Activation kind, typename T>
void activate_strip(const T* x, const T* up, T* out, int64_t count) {
  constexpr bool gated = kind == Activation::kSwiglu;
  int64_t i = 0;
  for (; i + kStep<T> <= count; i += kStep<T>) {
    const vector_t<T> value = load(x + i);
    store(out + i, activate<kind>(value, gated ? load(up + i) : value));
  }
  if (const int rest = static_cast<int>(count - i); rest > 0) {
    const vector_t<T> value = load_partial(x + i, rest);
    store_partial(out + i, activate<kind>(value, gated ? load_partial(up + i, rest) : value), rest);
  }
}

template <Activation kind, typename T>
void differentiate_strip(const T* grad, const T* x, const T* up, T* grad_x, T* grad_up, int64_t count) {
  constexpr bool gated = kind == Activation::kSwiglu;
  vector_t<T> second{};
  int64_t i = 0;
  for (; i + kStep<T> <= count; i += kStep<T>) {
    const vector_t<T> value = load(x + i);
    store(grad_x + i, differentiate<kind>(load(grad + i), value, gated ? load(up + i) : value, second));
    if constexpr (gated) store(grad_up + i, second);
  }
  if (const int rest = static_cast<int>(count - i); rest > 0) {
    const vector_t<T> value = load_partial(x + i, rest);
    const vector_t<T> other = gated ? load_partial(up + i, rest) : value;
    store_partial(grad_x + i, differentiate<kind>(load_partial(grad + i, rest), value, other, second), rest);
    if constexpr (gated) store_partial(grad_up + i, second, rest);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
