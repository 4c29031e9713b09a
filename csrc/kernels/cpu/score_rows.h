// Scores of one token's row of logits, computed with the vectors of the instruction set being compiled (included by
// bodies for for_each_isa.h; no include guard on purpose). Every instruction set gives the same bits as core/score.h
// and pymoe/reference/scores.py, because sums are kept in kSumLanes virtual lanes.

namespace pymoe::cpu::PYMOE_ISA {

// Number of vectors that contain the kSumLanes virtual lanes.
template <typename S>
inline constexpr int kLaneVectors = kSumLanes / kLanes<S>;

// Calls f(vector, first, count, part) for all vectors of a row of `size` elements stored as T, one block of kSumLanes
// elements after the other. `part` is the vector's index in its block. The vector contains the `count` elements from
// `first` on. In the last block, `count` may be less than the number of lanes, even 0; the other lanes are then `fill`.
template <typename T, typename F>
PYMOE_INLINE void for_row(const T* row, int64_t size, accumulate_t<T> fill, const F& f) {
  using S = accumulate_t<T>;
  constexpr int kL = kLanes<S>;
  int64_t block = 0;
  for (; block + kSumLanes <= size; block += kSumLanes) {
    for (int part = 0; part < kLaneVectors<S>; ++part) f(load(row + block + part * kL), block + part * kL, kL, part);
  }
  if (block < size) {
    const int rest = static_cast<int>(size - block);
    S padded[kSumLanes];
    for (int i = 0; i < kSumLanes; ++i) padded[i] = i < rest ? to_accumulate(row[block + i]) : fill;
    for (int part = 0; part < kLaneVectors<S>; ++part) {
      const int count = rest < part * kL ? 0 : rest - part * kL < kL ? rest - part * kL : kL;
      f(load(padded + part * kL), block + part * kL, count, part);
    }
  }
}

// Returns a row in the accumulated dtype (store_row converts back): the row itself, or a widened copy in `scratch`,
// which must have room for `size` elements. Code that uses the result is compiled per accumulated dtype, not per dtype.
template <typename T>
PYMOE_INLINE const accumulate_t<T>* widened_row(const T* row, int64_t size, accumulate_t<T>* scratch) {
  using S = accumulate_t<T>;
  if constexpr (std::is_same_v<T, S>) {
    return row;
  } else {
    for_vectors<T>(size, [&](int64_t i, int count) { store_count(scratch + i, load_count(row + i, count), count); });
    return scratch;
  }
}

// A sum in kSumLanes virtual lanes, which are kLaneVectors vectors. Call add() for a row's vectors in order, with zeros
// past the row's end; `part` is the index of the vector to which `value` is added.
template <typename S>
class LaneSum {
 public:
  PYMOE_INLINE void add(vector_t<S> value, int part) { lanes_[part] += value; }

  PYMOE_INLINE S total() {
    for (int half = kLaneVectors<S> / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes_[i] += lanes_[i + half];
    }
    return sum_lanes(lanes_[0]);
  }

 private:
  vector_t<S> lanes_[kLaneVectors<S>] = {};
};

// Returns the greatest logit of a row, ignoring NaNs (-infinity if all are NaN).
template <typename T>
PYMOE_INLINE accumulate_t<T> max_of_row(const T* row, int64_t size) {
  using S = accumulate_t<T>;
  constexpr S kLeast = -std::numeric_limits<S>::infinity();
  vector_t<T> best = broadcast(kLeast);
  for_row(row, size, kLeast, [&](vector_t<T> value, int64_t, int, int) { best = max(value, best); });
  S result = best[0];
  for (int lane = 1; lane < kStep<T>; ++lane) result = best[lane] > result ? best[lane] : result;
  return result;
}

// Returns the sum of e^(logit - max) over the row. If `exps` is not null, writes each of these values to it.
template <typename T>
PYMOE_INLINE accumulate_t<T> exp_row(const T* row, int64_t size, accumulate_t<T> max, accumulate_t<T>* exps) {
  using S = accumulate_t<T>;
  LaneSum<S> sum;
  for_row(row, size, -std::numeric_limits<S>::infinity(), [&](vector_t<T> value, int64_t first, int count, int part) {
    vector_t<T> e = exp(value - max);
    for (int lane = count; lane < kStep<T>; ++lane) e[lane] = 0;
    if (exps != nullptr) store_count(exps + first, e, count);
    sum.add(e, part);
  });
  return sum.total();
}

template <typename Vector>
PYMOE_INLINE Vector sigmoid(Vector x) {
  return 1 / (exp(-x) + 1);
}

template <typename S>
void softmax_row(const S* row, int64_t size, S* scores) {
  const S sum = exp_row(row, size, max_of_row(row, size), scores);
  for_row(scores, size, S{0},
          [&](vector_t<S> e, int64_t first, int count, int) { store_count(scores + first, e / sum, count); });
}

template <typename S>
void sigmoid_row(const S* row, int64_t size, S* scores) {
  for_row(row, size, S{0}, [&](vector_t<S> value, int64_t first, int count, int) {
    store_count(scores + first, sigmoid(value), count);
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
