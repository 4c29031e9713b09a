// The steps of expert_activation, for V an element or a vector of elements. Included by core/activation.h and, once for
// each instruction set, by the CPU kernel (no include guard on purpose). Each includer first defines element_t<V>,
// exp_in_fixed_steps(V), one_plus_exp(V) and, for fp64, normal_cdf(V, V&).

// Returns the normal distribution's Phi(x) in fp32, and stores e^(-x^2 / 2) in `gauss`. The polynomial uses Estrin's
// scheme: short chains of dependent operations.
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

// Returns (1 + tanh u) / 2 = 1 / (1 + e^(-2 u)), the factor of x in gelu_tanh, and stores 2 du/dx in `slope`; see
// GeluTanh for u. Beyond kSaturated, both are those at kSaturated, where the factor is 0 or 1.
template <typename V>
PYMOE_HOST_DEVICE PYMOE_INLINE V tanh_gate(V x, V& slope) {
  using S = element_t<V>;
  constexpr S kLinear = S(GeluTanh::kLinear), kCubic = S(GeluTanh::kCubic), kSlope = S(3 * GeluTanh::kCubic);
  V inside = x < S(-GeluTanh::kSaturated) ? V{} - S(GeluTanh::kSaturated) : x;
  inside = inside > S(GeluTanh::kSaturated) ? V{} + S(GeluTanh::kSaturated) : inside;
  const V square = inside * inside;
  slope = kLinear + kSlope * square;
  return S(1) / one_plus_exp(-(inside * (kLinear + kCubic * square)));
}

// Returns `x` clamped to [-limit, limit]; NaN stays NaN.
template <typename V, typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE V clamp_both(V x, S limit) {
  const V low = x < -limit ? V{} - limit : x;
  return low > limit ? V{} + limit : low;
}

// Returns the activation of x (the gate, for gated kinds). Only gated kinds read `up`, and only kClampedSwiglu reads
// `clamp`.
template <Activation kind, typename V>
PYMOE_HOST_DEVICE PYMOE_INLINE V activate(V x, V up, const SwigluClamp<element_t<V>>& clamp) {
  if constexpr (kind == Activation::kSwiglu) {
    return x / one_plus_exp(-x) * up;
  } else if constexpr (kind == Activation::kClampedSwiglu) {
    const V gate = x > clamp.limit ? V{} + clamp.limit : x;
    return gate / one_plus_exp(-(gate * clamp.alpha)) * (clamp_both(up, clamp.limit) + clamp.up_offset);
  } else if constexpr (kind == Activation::kGelu || kind == Activation::kGeglu) {
    V gauss;
    const V value = x * normal_cdf(x, gauss);
    return is_gated(kind) ? value * up : value;
  } else if constexpr (kind == Activation::kGeluTanh || kind == Activation::kGegluTanh) {
    V slope;
    const V value = x * tanh_gate(x, slope);
    return is_gated(kind) ? value * up : value;
  } else {
    const V positive = x <= element_t<V>(0) ? V{} : x;
    return kind == Activation::kReluSquared ? positive * positive : positive;
  }
}

// Returns the gradient of x (of the gate, for gated kinds). For gated kinds, also stores the gradient of up in
// `grad_up`.
template <Activation kind, typename V>
PYMOE_HOST_DEVICE PYMOE_INLINE V differentiate(V grad, V x, V up, V& grad_up, const SwigluClamp<element_t<V>>& clamp) {
  using S = element_t<V>;
  if constexpr (kind == Activation::kSwiglu) {
    const V gate = S(1) / one_plus_exp(-x);
    grad_up = grad * (x * gate);
    return grad * up * (gate * (S(1) + x * (S(1) - gate)));
  } else if constexpr (kind == Activation::kClampedSwiglu) {
    const V clamped = x > clamp.limit ? V{} + clamp.limit : x;
    const V scaled = clamped * clamp.alpha, gate = S(1) / one_plus_exp(-scaled);
    const V of_up = grad * (clamped * gate);
    grad_up = up < -clamp.limit ? V{} : (up > clamp.limit ? V{} : of_up);
    const V of_x = grad * (clamp_both(up, clamp.limit) + clamp.up_offset) * (gate * (S(1) + scaled * (S(1) - gate)));
    return x > clamp.limit ? V{} : of_x;
  } else if constexpr (kind == Activation::kGelu || kind == Activation::kGeglu) {
    V gauss;
    const V distribution = normal_cdf(x, gauss);
    const V of_x = grad * (distribution + x * (gauss * S(kInverseSqrt2Pi)));
    if (is_gated(kind)) grad_up = grad * (x * distribution);
    return is_gated(kind) ? of_x * up : of_x;
  } else if constexpr (kind == Activation::kGeluTanh || kind == Activation::kGegluTanh) {
    V slope;
    const V gate = tanh_gate(x, slope);
    const V of_x = grad * (gate + x * (gate * (S(1) - gate)) * slope);
    if (is_gated(kind)) grad_up = grad * (x * gate);
    return is_gated(kind) ? of_x * up : of_x;
  } else {
    const V of_x = kind == Activation::kReluSquared ? grad * (x + x) : grad;
    return x <= S(0) ? V{} : of_x;
  }
}
