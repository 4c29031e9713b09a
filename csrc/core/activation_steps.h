// The steps of expert_activation, for V an element or a vector of them. Included by core/activation.h and, once an
// instruction set, by the CPU kernel (no include guard on purpose), each of which has element_t<V>,
// exp_in_fixed_steps(V), one_plus_exp(V) and normal_cdf(V, V&) of fp64 before it.

// The normal distribution's Phi(x) in fp32, and e^(-x^2 / 2) into `gauss`. The polynomial by Estrin's scheme: short
// chains of dependent operations.
template <typename V>
PYMOE_HOST_DEVICE PYMOE_INLINE V normal_cdf(V x, V& gauss) {
  using P = NormalTail;
  gauss = exp_in_fixed_steps(x * x * -0.5f);
  const V magnitude = x < 0.0f ? -x : x;
  const V t = 1.0f / (1.0f + magnitude * P::kSlope);
  const V t2 = t * t, t4 = t2 * t2;
  const V low = (P::kP0 + t * P::kP1) + (P::kP2 + t * P::kP3) * t2;
  const V high = (P::kP4 + t * P::kP5) + (P::kP6 + t * P::kP7) * t2;
  const V tail = gauss * t * (low + (high + t4 * P::kP8) * t4);
  return x > 0.0f ? 1.0f - tail : tail;
}

// One result. `up` is read by swiglu alone.
template <Activation kind, typename V>
PYMOE_HOST_DEVICE PYMOE_INLINE V activate(V x, V up) {
  if constexpr (kind == Activation::kSwiglu) {
    return x / one_plus_exp(-x) * up;
  } else if constexpr (kind == Activation::kGelu) {
    V gauss;
    return x * normal_cdf(x, gauss);
  } else {
    return x <= element_t<V>(0) ? V{} : x;
  }
}

// One gradient: of x (the gate, for swiglu), and of up into `grad_up`.
template <Activation kind, typename V>
PYMOE_HOST_DEVICE PYMOE_INLINE V differentiate(V grad, V x, V up, V& grad_up) {
  using S = element_t<V>;
  if constexpr (kind == Activation::kSwiglu) {
    const V gate = S(1) / one_plus_exp(-x);
    grad_up = grad * (x * gate);
    return grad * up * (gate * (S(1) + x * (S(1) - gate)));
  } else if constexpr (kind == Activation::kGelu) {
    V gauss;
    const V distribution = normal_cdf(x, gauss);
    return grad * (distribution + x * (gauss * S(kInverseSqrt2Pi)));
  } else {
    return x <= S(0) ? V{} : grad;
  }
}
