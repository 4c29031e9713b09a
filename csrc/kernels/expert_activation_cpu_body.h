// The loops of expert_activation, compiled once an instruction set (see expert_activation.h): the steps of
// core/activation.h on vectors.

namespace pymoe::cpu::PYMOE_ISA {

// Phi(x), and e^(-x^2 / 2) into `gauss`: the steps of core/activation.h.
PYMOE_INLINE vfloat normal_cdf(vfloat x, vfloat& gauss) {
  using P = NormalTail;
  gauss = exp(x * x * -0.5f);
  const vfloat magnitude = x < 0.0f ? -x : x;
  const vfloat t = 1.0f / (1.0f + magnitude * P::kSlope);
  const vfloat t2 = t * t, t4 = t2 * t2;
  const vfloat low = (P::kP0 + t * P::kP1) + (P::kP2 + t * P::kP3) * t2;
  const vfloat high = (P::kP4 + t * P::kP5) + (P::kP6 + t * P::kP7) * t2;
  const vfloat tail = gauss * t * (low + (high + t4 * P::kP8) * t4);
  return x > 0.0f ? 1.0f - tail : tail;
}

PYMOE_INLINE vdouble normal_cdf(vdouble x, vdouble& gauss) {
  gauss = exp(x * x * -0.5);
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = 0.5 * std::erfc(x[lane] * kMinusInverseSqrt2);
  return x;
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
    Vector gauss;
    return x * normal_cdf(x, gauss);
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
    Vector gauss;
    const Vector distribution = normal_cdf(x, gauss);
    return grad * (distribution + x * (gauss * S(kInverseSqrt2Pi)));
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
