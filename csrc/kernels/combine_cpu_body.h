// The loops of combine and its backward, compiled once per instruction set (see cpu/for_each_isa.h).

namespace pymoe::cpu::PYMOE_ISA {

// Returns total + weight * value, product and addition rounded separately, or total + value if there are no weights.
template <bool kWeighted, typename Vector, typename Scalar>
PYMOE_INLINE Vector accumulate(Vector total, Scalar weight, Vector value) {
  if constexpr (kWeighted) {
    return total + broadcast(weight) * value;
  } else {
    return total + value;
  }
}

// The choices of one token, without the dropped ones.
template <typename T>
struct Choices {
  const T** rows;            // room for K
  const T** biases;          // room for K; null if the row has no expert
  accumulate_t<T>* weights;  // room for K
  int64_t count;
};

// Computes one token's row of `out`. Meanwhile prefetches the rows of `next`, the next token, if they are 16-bit:
// converting a block of these takes longer than loading it. With wider rows, prefetching gains nothing.
template <typename T, bool kWeighted, bool kBiased>
PYMOE_INLINE void combine_row(const Choices<T>& now, const Choices<T>& next, T* out, int64_t hidden) {
  constexpr int kVectors = 4, kBlock = kVectors * kStep<T>;
  int64_t column = 0;
  for (; column + kBlock <= hidden; column += kBlock) {
    vector_t<T> totals[kVectors] = {};
    for (int64_t k = 0; k < now.count; ++k) {
      const T* row = now.rows[k] + column;
      for (int v = 0; v < kVectors; ++v) {
        vector_t<T> value = load(row + v * kStep<T>);
        if (kBiased && now.biases[k] != nullptr) value = value + load(now.biases[k] + column + v * kStep<T>);
        totals[v] = accumulate<kWeighted>(totals[v], now.weights[k], value);
      }
    }
    if constexpr (sizeof(T) == 2) {
      constexpr int kLine = 64 / static_cast<int>(sizeof(T));  // elements per cache line; a block has several lines
      for (int64_t k = 0; k < next.count; ++k) {
        for (int ahead = 0; ahead < kBlock; ahead += kLine) __builtin_prefetch(next.rows[k] + column + ahead);
      }
    }
    for (int v = 0; v < kVectors; ++v) store(out + column + v * kStep<T>, totals[v]);
  }
  for (; column < hidden; column += kStep<T>) {
    const int count = hidden - column < kStep<T> ? static_cast<int>(hidden - column) : kStep<T>;
    vector_t<T> total = {};
    for (int64_t k = 0; k < now.count; ++k) {
      vector_t<T> value = load_partial(now.rows[k] + column, count);
      if (kBiased && now.biases[k] != nullptr) value = value + load_partial(now.biases[k] + column, count);
      total = accumulate<kWeighted>(total, now.weights[k], value);
    }
    store_partial(out + column, total, count);
  }
}

template <typename T, bool kWeighted, bool kBiased>
PYMOE_INLINE void find_choices(const CombineArguments& a, int64_t token, Choices<T>& choices) {
  choices.count = 0;
  for (int64_t choice = token * a.choices; choice < (token + 1) * a.choices; ++choice) {
    const int64_t slot = checked_slot("combine", a.slot, choice, a.choices, a.rows);
    if (slot < 0) continue;
    choices.rows[choices.count] = static_cast<const T*>(a.y) + slot * a.hidden;
    if constexpr (kBiased) choices.biases[choices.count] = bias_of_row<T>(a.biases, slot, a.hidden);
    if constexpr (kWeighted) choices.weights[choices.count] = static_cast<const accumulate_t<T>*>(a.weights)[choice];
    ++choices.count;
  }
}

template <typename T, bool kWeighted, bool kBiased>
PYMOE_INLINE void combine_tokens(const CombineArguments& a, int64_t begin, int64_t end, void* scratch) {
  const auto rows = static_cast<const T**>(scratch), biases = rows + 2 * a.choices;
  const auto weights = reinterpret_cast<accumulate_t<T>*>(biases + 2 * a.choices);
  Choices<T> now{rows, biases, weights, 0};
  Choices<T> next{rows + a.choices, biases + a.choices, weights + a.choices, 0};
  find_choices<T, kWeighted, kBiased>(a, begin, next);
  for (int64_t token = begin; token < end; ++token) {
    std::swap(now, next);
    next.count = 0;
    if (token + 1 < end) find_choices<T, kWeighted, kBiased>(a, token + 1, next);
    combine_row<T, kWeighted, kBiased>(now, next, static_cast<T*>(a.out) + token * a.hidden, a.hidden);
  }
}

// Computes tokens [begin, end), at least one. `scratch` has room for 4 K pointers and 2 K doubles.
inline void combine_range(const CombineArguments& a, int64_t begin, int64_t end, void* scratch) {
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    const auto run = [&](auto weighted, auto biased) {
      combine_tokens<T, weighted(), biased()>(a, begin, end, scratch);
    };
    const auto with = [&](auto weighted) {
      a.biases.data != nullptr ? run(weighted, std::true_type{}) : run(weighted, std::false_type{});
    };
    a.weights != nullptr ? with(std::true_type{}) : with(std::false_type{});
  });
}

// Handles one choice: writes dy = weight * grad if kRows, and returns the inner product of grad and y if kWeights. The
// y of the inner product includes the bias, if there is one.
template <typename T, bool kRows, bool kWeights, bool kBiased>
PYMOE_INLINE accumulate_t<T> combine_backward_row(const T* grad, const T* y, const T* bias, accumulate_t<T> weight,
                                                  T* dy, int64_t hidden) {
  using Accumulate = accumulate_t<T>;
  constexpr int kSums = 32, kVectors = kSums / kStep<T>;
  vector_t<T> sums[kVectors] = {};
  const vector_t<T> weight_v = broadcast(weight);
  int64_t column = 0;
  for (; column + kSums <= hidden; column += kSums) {
    for (int v = 0; v < kVectors; ++v) {
      const vector_t<T> g = load(grad + column + v * kStep<T>);
      if constexpr (kRows) store(dy + column + v * kStep<T>, weight_v * g);
      if constexpr (kWeights) {
        vector_t<T> value = load(y + column + v * kStep<T>);
        if (kBiased && bias != nullptr) value = value + load(bias + column + v * kStep<T>);
        sums[v] = sums[v] + g * value;
      }
    }
  }
  for (int v = 0; column < hidden; ++v, column += kStep<T>) {
    const int rest = hidden - column < kStep<T> ? static_cast<int>(hidden - column) : kStep<T>;
    const vector_t<T> g = load_partial(grad + column, rest);
    if constexpr (kRows) store_partial(dy + column, weight_v * g, rest);
    if constexpr (kWeights) {
      vector_t<T> value = load_partial(y + column, rest);
      if (kBiased && bias != nullptr) value = value + load_partial(bias + column, rest);
      sums[v] = sums[v] + g * value;
    }
  }
  Accumulate lanes[kSums];
  for (int v = 0; v < kVectors; ++v) store(lanes + v * kStep<T>, sums[v]);
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <typename T, bool kRows, bool kWeights, bool kBiased>
PYMOE_INLINE void combine_backward_tokens(const CombineBackwardArguments& a, int64_t begin, int64_t end) {
  using Accumulate = accumulate_t<T>;
  const auto* grad = static_cast<const T*>(a.grad);
  const auto* y = static_cast<const T*>(a.y);
  const auto* weights = static_cast<const Accumulate*>(a.weights);
  auto* dy = static_cast<T*>(a.dy);
  auto* dweights = static_cast<Accumulate*>(a.dweights);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t choice = token * a.choices; choice < (token + 1) * a.choices; ++choice) {
      const int64_t slot = checked_slot("combine_backward", a.slot, choice, a.choices, a.rows);
      Accumulate product = 0;
      if (slot >= 0) {
        const T* bias = kBiased ? bias_of_row<T>(a.biases, slot, a.hidden) : nullptr;
        product = combine_backward_row<T, kRows, kWeights, kBiased>(grad + token * a.hidden, y + slot * a.hidden, bias,
                                                                    kRows ? weights[choice] : Accumulate(0),
                                                                    dy + slot * a.hidden, a.hidden);
      }
      if constexpr (kWeights) dweights[choice] = product;
    }
  }
}

inline void combine_backward_range(const CombineBackwardArguments& a, int64_t begin, int64_t end) {
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    const auto with = [&](auto biased) {
      if (a.dy == nullptr) {
        combine_backward_tokens<T, false, true, biased()>(a, begin, end);
      } else {
        combine_backward_tokens<T, true, true, biased()>(a, begin, end);
      }
    };
    if (a.dweights == nullptr) {
      combine_backward_tokens<T, true, false, false>(a, begin, end);
    } else {
      a.biases.data != nullptr ? with(std::true_type{}) : with(std::false_type{});
    }
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
