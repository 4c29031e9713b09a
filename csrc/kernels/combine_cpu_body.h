// The loops of combine and its backward, compiled once an instruction set (see cpu/for_each_isa.h).

namespace pymoe::cpu::PYMOE_ISA {

// total += weight * value, product and addition rounded separately; just value where there are no weights.
template <bool kWeighted, typename Vector, typename Scalar>
PYMOE_INLINE Vector accumulate(Vector total, Scalar weight, Vector value) {
  if constexpr (kWeighted) {
    return total + broadcast(weight) * value;
  } else {
    return total + value;
  }
}

template <typename T, bool kWeighted, int kVectors>
PYMOE_INLINE void combine_columns(const T* const* rows, const accumulate_t<T>* weights, int64_t count, T* out,
                                  int64_t column) {
  vector_t<T> total[kVectors] = {};
  for (int64_t k = 0; k < count; ++k) {
    const T* row = rows[k] + column;
    for (int v = 0; v < kVectors; ++v) {
      total[v] = accumulate<kWeighted>(total[v], weights[k], load(row + v * kStep<T>));
    }
  }
  for (int v = 0; v < kVectors; ++v) store(out + column + v * kStep<T>, total[v]);
}

template <typename T, bool kWeighted>
PYMOE_INLINE void combine_row(const T* const* rows, const accumulate_t<T>* weights, int64_t count, T* out,
                              int64_t hidden) {
  constexpr int kVectors = 4;
  int64_t column = 0;
  for (; column + kVectors * kStep<T> <= hidden; column += kVectors * kStep<T>) {
    combine_columns<T, kWeighted, kVectors>(rows, weights, count, out, column);
  }
  for (; column + kStep<T> <= hidden; column += kStep<T>) {
    combine_columns<T, kWeighted, 1>(rows, weights, count, out, column);
  }
  if (column < hidden) {
    const int rest = static_cast<int>(hidden - column);
    vector_t<T> total = {};
    for (int64_t k = 0; k < count; ++k) {
      total = accumulate<kWeighted>(total, weights[k], load_partial(rows[k] + column, rest));
    }
    store_partial(out + column, total, rest);
  }
}

// Tokens [begin, end). `rows` and `weights` have room for K entries: the choices of a token that were not dropped.
template <typename T, bool kWeighted>
PYMOE_INLINE void combine_tokens(const CombineArguments& a, int64_t begin, int64_t end, const T** rows,
                                 accumulate_t<T>* weights) {
  const auto* y = static_cast<const T*>(a.y);
  auto* out = static_cast<T*>(a.out);
  for (int64_t token = begin; token < end; ++token) {
    int64_t count = 0;
    for (int64_t choice = token * a.choices; choice < (token + 1) * a.choices; ++choice) {
      const int64_t slot = checked_slot("combine", a.slot, choice, a.choices, a.tokens);
      if (slot < 0) continue;
      rows[count] = y + slot * a.hidden;
      weights[count++] = kWeighted ? static_cast<const accumulate_t<T>*>(a.weights)[choice] : accumulate_t<T>(1);
    }
    combine_row<T, kWeighted>(rows, weights, count, out + token * a.hidden, a.hidden);
  }
}

inline void combine_range(const CombineArguments& a, int64_t begin, int64_t end, const void** rows, double* weights) {
  visit_dtype(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto typed_rows = reinterpret_cast<const T**>(rows);
    const auto typed_weights = reinterpret_cast<accumulate_t<T>*>(weights);
    if (a.weights != nullptr) {
      combine_tokens<T, true>(a, begin, end, typed_rows, typed_weights);
    } else {
      combine_tokens<T, false>(a, begin, end, typed_rows, typed_weights);
    }
  });
}

// One choice: dy = weight * grad where kRows, and the inner product of grad and y where kWeights.
template <typename T, bool kRows, bool kWeights>
PYMOE_INLINE accumulate_t<T> combine_backward_row(const T* grad, const T* y, accumulate_t<T> weight, T* dy,
                                                  int64_t hidden) {
  using Accumulate = accumulate_t<T>;
  constexpr int kSums = 32, kVectors = kSums / kStep<T>;
  vector_t<T> sums[kVectors] = {};
  const vector_t<T> weight_v = broadcast(weight);
  int64_t column = 0;
  for (; column + kSums <= hidden; column += kSums) {
    for (int v = 0; v < kVectors; ++v) {
      const vector_t<T> g = load(grad + column + v * kStep<T>);
      if constexpr (kRows) store(dy + column + v * kStep<T>, weight_v * g);
      if constexpr (kWeights) sums[v] = sums[v] + g * load(y + column + v * kStep<T>);
    }
  }
  for (int v = 0; column < hidden; ++v, column += kStep<T>) {
    const int rest = hidden - column < kStep<T> ? static_cast<int>(hidden - column) : kStep<T>;
    const vector_t<T> g = load_partial(grad + column, rest);
    if constexpr (kRows) store_partial(dy + column, weight_v * g, rest);
    if constexpr (kWeights) sums[v] = sums[v] + g * load_partial(y + column, rest);
  }
  Accumulate lanes[kSums];
  for (int v = 0; v < kVectors; ++v) store(lanes + v * kStep<T>, sums[v]);
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <typename T, bool kRows, bool kWeights>
PYMOE_INLINE void combine_backward_tokens(const CombineBackwardArguments& a, int64_t begin, int64_t end) {
  using Accumulate = accumulate_t<T>;
  const auto* grad = static_cast<const T*>(a.grad);
  const auto* y = static_cast<const T*>(a.y);
  const auto* weights = static_cast<const Accumulate*>(a.weights);
  auto* dy = static_cast<T*>(a.dy);
  auto* dweights = static_cast<Accumulate*>(a.dweights);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t choice = token * a.choices; choice < (token + 1) * a.choices; ++choice) {
      const int64_t slot = checked_slot("combine_backward", a.slot, choice, a.choices, a.tokens);
      Accumulate product = 0;
      if (slot >= 0) {
        product = combine_backward_row<T, kRows, kWeights>(grad + token * a.hidden, y + slot * a.hidden,
                                                           kRows ? weights[choice] : Accumulate(0),
                                                           dy + slot * a.hidden, a.hidden);
      }
      if constexpr (kWeights) dweights[choice] = product;
    }
  }
}

inline void combine_backward_range(const CombineBackwardArguments& a, int64_t begin, int64_t end) {
  visit_dtype(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.dy != nullptr && a.dweights != nullptr) {
      combine_backward_tokens<T, true, true>(a, begin, end);
    } else if (a.dy != nullptr) {
      combine_backward_tokens<T, true, false>(a, begin, end);
    } else {
      combine_backward_tokens<T, false, true>(a, begin, end);
    }
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
