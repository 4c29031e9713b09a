// The loops of expert_activation, compiled once an instruction set (see expert_activation.h).

namespace pymoe::cpu::PYMOE_ISA {

// The normal distribution's Phi(x), and e^(-x^2 / 2) into `gauss`.
//
// fp32: for z = |x| / sqrt 2 and t = 1 / (1 + 0.3 z), 1 - Phi(|x|) = e^(-z^2) t P(t). P is a minimax fit (relative
// error 2e-8 for 0 <= z <= 10.5, beyond which the result underflows), so the lower tail keeps its relative accuracy,
// which it loses as 1 + erf. Evaluated by Estrin's scheme: short chains of dependent operations.
PYMOE_INLINE vfloat normal_cdf(vfloat x, vfloat& gauss) {
  gauss = exp(x * x * -0.5f);
  const vfloat magnitude = x < 0.0f ? -x : x;
  const vfloat t = 1.0f / (1.0f + magnitude * 0.212132034f);
  const vfloat t2 = t * t, t4 = t2 * t2;
  const vfloat low = (0.0845937263f + t * 0.0853616191f) + (0.0741449206f + t * 0.107547398f) * t2;
  const vfloat high = (-0.0475009843f + t * 0.27408818f) + (-0.25632001f + t * 0.242861843f) * t2;
  const vfloat tail = gauss * t * (low + (high + t4 * -0.0647767023f) * t4);
  return x > 0.0f ? 1.0f - tail : tail;
}

PYMOE_INLINE vdouble normal_cdf(vdouble x, vdouble& gauss) {
  gauss = exp(x * x * -0.5);
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = 0.5 * std::erfc(x[lane] * -0.70710678118654752);
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
    return grad * (distribution + x * (gauss * S(0.39894228040143268)));
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
