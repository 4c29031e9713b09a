// The inner loops of gate_topk for one instruction set; see kernels/cpu/for_each_isa.h.
//
// A tile has as many tokens as a vector has lanes. First most experts are excluded, for one token's row at a time: each
// of 16 or 32 virtual lanes holds the maximum of its share of the row. At least K logits reach the K-th greatest of
// these maxima, so logits below that maximum cannot be among the best K. On average a little more than K candidates
// remain. Then all tokens of the tile are handled together, one per lane: each token's best experts are kept as a
// sorted list, spread over the same lane of several vectors, into which the candidates are inserted without a branch.

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/score_rows.h"

namespace pymoe::cpu::PYMOE_ISA {

template <typename S>
using key_vector = decltype(vector_t<S>{} < vector_t<S>{});

// order_keys and values_of_keys apply order_key and value_of_key of core/order.h to every lane.
template <typename S>
PYMOE_INLINE key_vector<S> order_keys(vector_t<S> value) {
  constexpr order_key_t<S> kMagnitude = std::numeric_limits<order_key_t<S>>::max();
  const key_vector<S> bits = (key_vector<S>)(value + S{0});
  const key_vector<S> key = bits ^ ((bits >> (8 * sizeof(S) - 1)) & kMagnitude);
  return ((value != value) & kMagnitude) | (~(value != value) & key);
}

template <typename S>
PYMOE_INLINE vector_t<S> values_of_keys(key_vector<S> key) {
  return (vector_t<S>)(key ^ ((key >> (8 * sizeof(S) - 1)) & std::numeric_limits<order_key_t<S>>::max()));
}

// The N best (key, expert) pairs of each lane, best first.
template <typename S, int N>
struct Best {
  using Keys = key_vector<S>;
  Keys keys[N];
  Keys experts[N];

  PYMOE_INLINE Best() {
    for (int j = 0; j < N; ++j) {
      keys[j] = Keys{} + kNoKey<S>;
      experts[j] = Keys{};
    }
  }

  // Inserts one candidate per lane. Candidates must come in ascending order of experts, so that equal keys stay in this
  // order.
  PYMOE_INLINE void insert(Keys key, Keys expert) {
    Keys better[N];
    for (int j = 0; j < N; ++j) better[j] = key > keys[j];
    for (int j = N - 1; j > 0; --j) {
      keys[j] = better[j - 1] ? keys[j - 1] : better[j] ? key : keys[j];
      experts[j] = better[j - 1] ? experts[j - 1] : better[j] ? expert : experts[j];
    }
    keys[0] = better[0] ? key : keys[0];
    experts[0] = better[0] ? expert : experts[0];
  }
};

template <typename S>
struct Scratch {
  S* wide;                     // (tile, E): logits of a 16-bit dtype, widened
  S* scores;                   // (tile, E): scores of the tile's tokens
  S* choice;                   // (tile, E): choice scores, moved so that the remaining groups are adjacent
  S* candidates;               // (E, tile)
  order_key_t<S>* candidate;   // (E, tile): the column of each candidate
  S* values;                   // (K, tile): the values by which experts were chosen
  order_key_t<S>* columns;     // (K, tile): the columns of these experts
  S* weights;                  // (K, tile)
  order_key_t<S>* group_keys;  // (groups, tile)
  int32_t* groups;             // (tile, groups): each token's remaining groups, ascending
  unsigned char* sorting;      // scratch memory of select_sorted

  PYMOE_INLINE Scratch(unsigned char* memory, const GateTopkArguments& a) {
    const auto take = [&](int64_t bytes) {
      unsigned char* part = memory;
      memory += (bytes + 63) / 64 * 64;
      return part;
    };
    constexpr int64_t kRow = kLanes<S> * static_cast<int64_t>(sizeof(S));
    wide = reinterpret_cast<S*>(take(kRow * a.num_experts));
    scores = reinterpret_cast<S*>(take(kRow * a.num_experts));
    choice = reinterpret_cast<S*>(take(kRow * a.num_experts));
    candidates = reinterpret_cast<S*>(take(kRow * a.num_experts));
    candidate = reinterpret_cast<order_key_t<S>*>(take(kRow * a.num_experts));
    values = reinterpret_cast<S*>(take(kRow * a.choices));
    columns = reinterpret_cast<order_key_t<S>*>(take(kRow * a.choices));
    weights = reinterpret_cast<S*>(take(kRow * a.choices));
    group_keys = reinterpret_cast<order_key_t<S>*>(take(kRow * a.num_groups));
    groups = reinterpret_cast<int32_t*>(take(kRow * a.num_groups));
    sorting = memory;
  }
};

// Calls f(columns, first, count) along the transposed rows of a tile: columns[i] holds element first + i of every row.
template <typename S, typename F>
PYMOE_INLINE void for_columns(const S* const* rows, int64_t begin, int64_t end, const F& f) {
  constexpr int kL = kLanes<S>;
  vector_t<S> columns[kL];
  int64_t i = begin;
  for (; i + kL <= end; i += kL) {
    for (int t = 0; t < kL; ++t) columns[t] = load(rows[t] + i);
    transpose<S>(columns);
    f(columns, i, kL);
  }
  if (i < end) {
    for (int t = 0; t < kL; ++t) columns[t] = load_partial(rows[t] + i, static_cast<int>(end - i));
    transpose<S>(columns);
    f(columns, i, static_cast<int>(end - i));
  }
}

// Writes the maxima of `kMaxima` virtual lanes of a row to `maxima`, ignoring NaNs.
template <int kMaxima, typename S>
PYMOE_INLINE void lane_maxima(const S* row, int64_t size, S* maxima) {
  constexpr int kL = kLanes<S>, kVectors = kMaxima / kL;
  constexpr S kLeast = -std::numeric_limits<S>::infinity();
  vector_t<S> best[kVectors];
  for (int v = 0; v < kVectors; ++v) best[v] = broadcast(kLeast);
  int64_t i = 0;
  for (; i + kMaxima <= size; i += kMaxima) {
    for (int v = 0; v < kVectors; ++v) best[v] = max(load(row + i + v * kL), best[v]);
  }
  if (i < size) {
    S padded[kMaxima];
    for (int lane = 0; lane < kMaxima; ++lane) padded[lane] = i + lane < size ? row[i + lane] : kLeast;
    for (int v = 0; v < kVectors; ++v) best[v] = max(load(padded + v * kL), best[v]);
  }
  for (int v = 0; v < kVectors; ++v) store(maxima + v * kL, best[v]);
}

// Writes the candidates of `row`, which is row `t` of the tile, to the scratch memory, and returns their number.
// Candidates are the elements that are not below `bound`.
template <typename S>
PYMOE_INLINE int64_t collect(const S* row, int64_t size, S bound, int t, const Scratch<S>& scratch) {
  constexpr int kL = kLanes<S>, kWord = 64;
  int64_t found = 0;
  for (int64_t word = 0; word < size; word += kWord) {
    uint64_t below = 0;
    const int width = size - word < kWord ? static_cast<int>(size - word) : kWord;
    if (width == kWord) {
      for (int i = 0; i < kWord; i += kL) {
        below |= static_cast<uint64_t>(bits_of(load(row + word + i) < bound)) << i;
      }
    } else {
      int i = 0;
      for (; i + kL <= width; i += kL) below |= static_cast<uint64_t>(bits_of(load(row + word + i) < bound)) << i;
      for (; i < width; ++i) below |= static_cast<uint64_t>(row[word + i] < bound) << i;
    }
    uint64_t kept = ~below & (~uint64_t{0} >> (kWord - width));
    while (kept != 0) {
      const int64_t column = word + __builtin_ctzll(kept);
      kept &= kept - 1;
      scratch.candidates[found * kL + t] = row[column];
      scratch.candidate[found * kL + t] = static_cast<order_key_t<S>>(column);
      ++found;
    }
  }
  return found;
}

// Writes the best `choices` <= N of `size` columns, for each row of the tile, to scratch.values and scratch.columns.
template <typename S, int N>
void select_up_to(const S* const* rows, int64_t size, int64_t choices, const Scratch<S>& scratch) {
  constexpr int kL = kLanes<S>, kMaxima = N <= 8 ? 16 : 32;
  S maxima[kL][kMaxima];
  const S* maxima_rows[kL];
  for (int t = 0; t < kL; ++t) {
    lane_maxima<kMaxima>(rows[t], size, maxima[t]);
    maxima_rows[t] = maxima[t];
  }
  vector_t<S> greatest[N];
  for (int j = 0; j < N; ++j) greatest[j] = broadcast(-std::numeric_limits<S>::infinity());
  for_columns(maxima_rows, 0, kMaxima, [&](const vector_t<S>(&columns)[kL], int64_t, int) {
    for (int i = 0; i < kL; ++i) {
      for (int j = N - 1; j > 0; --j) {
        const vector_t<S> lesser = columns[i] < greatest[j - 1] ? columns[i] : greatest[j - 1];
        greatest[j] = max(greatest[j], lesser);
      }
      greatest[0] = max(greatest[0], columns[i]);
    }
  });
  S bound[kL];
  store(bound, greatest[choices - 1]);

  key_vector<S> found;
  int64_t most = 0;
  for (int t = 0; t < kL; ++t) {
    const int64_t count = collect(rows[t], size, bound[t], t, scratch);
    found[t] = static_cast<order_key_t<S>>(count);
    most = count > most ? count : most;
  }
  Best<S, N> best;
  for (int64_t i = 0; i < most; ++i) {
    const key_vector<S> key = order_keys<S>(load(scratch.candidates + i * kL));
    key_vector<S> expert;
    memcpy(&expert, scratch.candidate + i * kL, sizeof(expert));
    const key_vector<S> there = found > static_cast<order_key_t<S>>(i);
    best.insert(there ? key : key_vector<S>{} + kNoKey<S>, expert);
  }
  for (int64_t j = 0; j < choices; ++j) {
    store(scratch.values + j * kL, values_of_keys<S>(best.keys[j]));
    memcpy(scratch.columns + j * kL, &best.experts[j], sizeof(best.experts[j]));
  }
}

template <typename S>
PYMOE_INLINE void select(const S* const* rows, int64_t size, int64_t choices, const Scratch<S>& scratch) {
  if constexpr (sizeof(S) == 4) {  // fewer sizes for float64: each costs seconds of compilation
    if (choices <= 2) return select_up_to<S, 2>(rows, size, choices, scratch);
    if (choices > 4 && choices <= 8) return select_up_to<S, 8>(rows, size, choices, scratch);
  }
  if (choices <= 4) return select_up_to<S, 4>(rows, size, choices, scratch);
  if (choices <= 16) return select_up_to<S, 16>(rows, size, choices, scratch);
  for (int t = 0; t < kLanes<S>; ++t) {
    select_sorted(rows[t], size, choices, kLanes<S>, scratch.values + t, scratch.columns + t, scratch.sorting);
  }
}

// Writes the indices of each token's best topk_groups groups to scratch.groups, and moves the choice scores of their
// experts next to each other in scratch.choice.
template <typename S>
void keep_best_groups(const GateTopkArguments& a, const Scratch<S>& scratch) {
  constexpr int kL = kLanes<S>;
  using Keys = key_vector<S>;
  const int64_t group_size = a.num_experts / a.num_groups;
  const S* rows[kL];
  for (int t = 0; t < kL; ++t) rows[t] = scratch.choice + t * a.num_experts;
  for (int64_t g = 0; g < a.num_groups; ++g) {
    Keys first = Keys{} + kNoKey<S>, second = first;
    for_columns(rows, g * group_size, (g + 1) * group_size, [&](const vector_t<S>(&columns)[kL], int64_t, int count) {
      for (int i = 0; i < count; ++i) {
        const Keys key = order_keys<S>(columns[i]);
        const Keys lesser = key > first ? first : key;
        second = lesser > second ? lesser : second;
        first = key > first ? key : first;
      }
    });
    vector_t<S> score = values_of_keys<S>(first);
    if (group_size > 1) score += values_of_keys<S>(second);
    const Keys key = order_keys<S>(score);
    memcpy(scratch.group_keys + g * kL, &key, sizeof(key));
  }
  int64_t kept[kL] = {};
  for (int64_t g = 0; g < a.num_groups; ++g) {
    Keys key, rank = {};
    memcpy(&key, scratch.group_keys + g * kL, sizeof(key));
    for (int64_t other = 0; other < a.num_groups; ++other) {
      Keys other_key;
      memcpy(&other_key, scratch.group_keys + other * kL, sizeof(key));
      rank -= other < g ? other_key >= key : other_key > key;
    }
    for (int t = 0; t < kL; ++t) {
      if (rank[t] < a.topk_groups) scratch.groups[t * a.num_groups + kept[t]++] = static_cast<int32_t>(g);
    }
  }
  for (int t = 0; t < kL; ++t) {
    S* row = scratch.choice + t * a.num_experts;
    for (int64_t i = 0; i < a.topk_groups; ++i) {
      const int64_t g = scratch.groups[t * a.num_groups + i];
      memmove(row + i * group_size, row + g * group_size, static_cast<size_t>(group_size) * sizeof(S));
    }
  }
}

// Writes the scores of the tile's tokens to scratch.scores. Writes the choice scores, which include the bias, to
// scratch.choice; with groups, only those of the best groups, next to each other.
template <typename S>
void score_tile(const GateTopkArguments& a, const S* const* rows, const Scratch<S>& scratch) {
  const auto* bias = static_cast<const S*>(a.bias);
  for (int t = 0; t < kLanes<S>; ++t) {
    S* scores = scratch.scores + t * a.num_experts;
    S* choice = scratch.choice + t * a.num_experts;
    if (a.options.score == Score::kSoftmax) {
      softmax_row(rows[t], a.num_experts, scores);
    } else {
      sigmoid_row(rows[t], a.num_experts, scores);
    }
    for (int64_t e = 0; e < a.num_experts; ++e) choice[e] = bias == nullptr ? scores[e] : scores[e] + bias[e];
  }
  if (a.num_groups > 0) keep_best_groups<S>(a, scratch);
}

// Writes the scores of the chosen experts, whose logits are in scratch.values, to scratch.weights. Softmax scores that
// will be renormalised remain e^(logit - best), which differs from the score by a factor per token.
template <typename S>
PYMOE_INLINE void score_chosen(const GateTopkArguments& a, const S* const* rows, const Scratch<S>& scratch) {
  constexpr int kL = kLanes<S>;
  const vector_t<S> greatest = load(scratch.values);
  vector_t<S> sum = broadcast(S{1});
  if (a.options.score == Score::kSoftmax && !a.options.renormalize) {
    for (int t = 0; t < kL; ++t) sum[t] = exp_row<S>(rows[t], a.num_experts, greatest[t], nullptr);
  }
  for (int64_t j = 0; j < a.choices; ++j) {
    const vector_t<S> logit = load(scratch.values + j * kL);
    const vector_t<S> score = a.options.score == Score::kSigmoid ? sigmoid(logit) : exp(logit - greatest) / sum;
    store(scratch.weights + j * kL, score);
  }
}

template <typename S>
PYMOE_INLINE void finish_weights(const GateTopkArguments& a, const Scratch<S>& scratch) {
  constexpr int kL = kLanes<S>;
  vector_t<S> divisor = broadcast(S{1});
  if (a.options.renormalize) {
    divisor = vector_t<S>{};
    for (int64_t block = 0; block < a.choices;
         block += kSumLanes) {  // summed in blocks, so that rounding stays small for large K
      vector_t<S> sum = {};
      for (int64_t j = block; j < a.choices && j < block + kSumLanes; ++j) sum += load(scratch.weights + j * kL);
      divisor += sum;
    }
    const vector_t<S> floor = broadcast(static_cast<S>(kScoreSumFloor));
    divisor = divisor < floor ? floor : divisor;  // keeps a NaN
  }
  for (int64_t j = 0; j < a.choices; ++j) {
    const vector_t<S> weight = load(scratch.weights + j * kL) / divisor * static_cast<S>(a.options.scale);
    store(scratch.weights + j * kL, weight);
  }
}

template <typename S>
void gate_tile(const GateTopkArguments& a, const S* const* rows, int64_t first, int count, const Scratch<S>& scratch,
               int32_t* histogram) {
  constexpr int kL = kLanes<S>;
  if (a.chooses_on_logits()) {
    select<S>(rows, a.num_experts, a.choices, scratch);
    score_chosen<S>(a, rows, scratch);
  } else {
    score_tile<S>(a, rows, scratch);
    const S* choice[kL];
    for (int t = 0; t < kL; ++t) choice[t] = scratch.choice + t * a.num_experts;
    const int64_t group_size = a.num_groups > 0 ? a.num_experts / a.num_groups : a.num_experts;
    select<S>(choice, a.num_groups > 0 ? a.topk_groups * group_size : a.num_experts, a.choices, scratch);
    for (int64_t i = 0; i < a.choices * kL; ++i) {
      const int64_t t = i % kL;
      int64_t expert = scratch.columns[i];
      if (a.num_groups > 0) {
        expert = scratch.groups[t * a.num_groups + expert / group_size] * group_size + expert % group_size;
      }
      scratch.columns[i] = static_cast<order_key_t<S>>(expert);
      scratch.weights[i] = scratch.scores[t * a.num_experts + expert];
    }
  }
  finish_weights<S>(a, scratch);

  S* weights = static_cast<S*>(a.weights) + first * a.choices;
  int32_t* experts = a.experts + first * a.choices;
  for (int t = 0; t < count; ++t) {
    for (int64_t j = 0; j < a.choices; ++j) {
      const auto expert = static_cast<int32_t>(scratch.columns[j * kL + t]);
      experts[t * a.choices + j] = expert;
      weights[t * a.choices + j] = scratch.weights[j * kL + t];
      ++histogram[expert];
    }
  }
}

void gate_tokens(const GateTopkArguments& a, int64_t begin, int64_t end, unsigned char* memory, int32_t* histogram) {
  visit_dtype(a.dtype, [&]<typename T>(TypeTag<T>) {
    using S = accumulate_t<T>;
    const Scratch<S> scratch(memory, a);
    for (int64_t first = begin; first < end; first += kLanes<S>) {
      const int count = end - first < kLanes<S> ? static_cast<int>(end - first) : kLanes<S>;
      const S* rows[kLanes<S>];
      for (int t = 0; t < kLanes<S>; ++t) {  // lanes past the last token repeat it; they are not written
        const int64_t token = first + (t < count ? t : count - 1);
        rows[t] = widened_row(static_cast<const T*>(a.logits) + token * a.num_experts, a.num_experts,
                              scratch.wide + t * a.num_experts);
      }
      gate_tile<S>(a, rows, first, count, scratch, histogram);
    }
  });
}

}  // namespace pymoe::cpu::PYMOE_ISA
