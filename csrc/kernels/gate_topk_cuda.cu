// The router's gate on the GPU, in one launch.
//
// A group of 4 to 32 lanes owns a token. Element l + n * kLanes of the row belongs to lane l: consecutive lanes load
// consecutive elements, so that every load fills its sectors for any E and any alignment. In a group of up to 16 lanes,
// a lane computes whole partial sums ("lanes") of core/score.h; in a group of 32, two lanes share each of them. Rows of
// up to 512 experts (256 if the scores of the whole row are needed) stay in registers as 32-bit keys, and all loads of
// a row are in flight together; longer rows and fp64 stay in a buffer (in shared memory, or in the workspace if shared
// memory is too small), with eight loads per lane in flight. A bias is loaded in the same way as the row.
//
// The time is limited by instructions, not by bytes. Choosing one expert per pass over the row, as other
// implementations do, takes many instructions in K dependent passes. Instead (choose.h), maxima of parts of the row
// give a bound that leaves little more than K candidates, which are ranked against each other. Passes, which need no
// memory, are made only for one or two choices, for more choices than maxima, and for rows with too many candidates,
// such as ties at the bound.
//
// Weights are computed by the lanes of the group in parallel, in the operations and order of the CPU twin: all outputs
// have its bits. Loads are counted in shared memory (of more than 8192 experts: directly in `load`), then added by one
// integer atomic per expert and block, in any order. A memset before the launch sets these sums to zero: blocks cannot
// wait for each other, so none of them can clear the memory for all. If one block has all tokens, there is no memset,
// and the block writes its counts.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/choose.h"
#include "kernels/cuda/held_row.h"
#include "kernels/gate_topk.h"

namespace pymoe::cuda {
namespace {

constexpr const char* kName = "gate_topk";
constexpr int kThreads = 256;
constexpr int64_t kBlocks = 528;             // maximum number of blocks: four for each of an H200's 132 multiprocessors
constexpr int64_t kCountedBlocks = 256;      // the same, if build_routing's blocks read each block's counts
constexpr int64_t kMostCounted = 8192;       // maximum number of experts whose choices are counted in shared memory
constexpr int64_t kMostBuffered = 64 << 20;  // maximum number of bytes of rows in the workspace
// Up to this number of tokens, groups of 16 lanes (16 tokens per block) make at most two blocks for each of 132
// multiprocessors. If rows are scored, groups of 16 lanes are then faster: their warps end sooner than with 8 lanes,
// although 8 lanes need fewer instructions in total.
constexpr int64_t kFewTokens = 4224;
constexpr int kHeldExperts = 512;  // maximum number of experts of a row that stays in registers
constexpr int kHeldScores = 256;   // the same, if the choice or the weights need the scores of the whole row

// How tokens are assigned to blocks, and where a block keeps its data.
struct Layout {
  int32_t tiles;       // tiles of threads / kLanes tokens
  int32_t each;        // consecutive tiles per block
  int32_t capacity;    // maximum number of candidates of a token; 0: choose by passes
  int32_t group_size;  // experts per group; 0: no groups
  int64_t row_keys;    // number of keys in a token's buffer: E and one per group, or none
  int64_t row_scores;  // number of scores that a token keeps in shared memory: E and a few more, or none
  bool counts_in_shared;
  void* rows;  // buffered keys, by block and token; null: they are in shared memory
};

// Calls f with a pointer to a token's row of logits, of the C++ type of the logits' dtype.
template <typename S, typename F>
PYMOE_DEVICE void with_logits(const GateTopkArguments& a, int64_t token, const F& f) {
  const int64_t start = token * a.num_experts;
  if constexpr (std::is_same_v<S, double>) {
    f(static_cast<const double*>(a.logits) + start);
  } else if (a.dtype == DType::kFloat32) {
    f(static_cast<const float*>(a.logits) + start);
  } else if (a.dtype == DType::kBFloat16) {
    f(static_cast<const BFloat16*>(a.logits) + start);
  } else {
    f(static_cast<const Float16*>(a.logits) + start);
  }
}

// One token, for which a group of kLanes lanes chooses the experts and computes their weights.
template <typename S, int kLanes, int kHeld, bool kScoresRow>
class Token {
  using Key = order_key_t<S>;

 public:
  PYMOE_DEVICE Token(const GateTopkArguments& a, const Layout& layout, int64_t token, bool writes, Key* buffer,
                     S* row_scores, int32_t* counts)
      : a_(a),
        layout_(layout),
        token_(token),
        writes_(writes),
        counts_(counts),
        buffer_(buffer),
        row_scores_(row_scores),
        row_(static_cast<uint32_t>(a.num_experts), buffer) {}

  PYMOE_DEVICE void gate(Candidate<S>* list, Candidate<S>* chosen, S* scores) {
    load_row();
    score_row();
    if (layout_.capacity > 0) {
      const Key best =
          choose_by_rank<S, kLanes, kMaxima>(row_, static_cast<int>(a_.choices), list, layout_.capacity, chosen);
      if (best != kNoKey<S>) return finish_ranked(best, chosen, scores);
      __syncwarp();
    }
    gate_by_passes();
  }

  // Number of maxima that each lane keeps. In usual shapes that makes twice as many maxima per token as it has choices,
  // so that few candidates remain.
  static constexpr int kMaxima = kHeld == 0 ? 8 : kLanes == kWarp ? 4 : 2;

 private:
  PYMOE_DEVICE int lane() const { return threadIdx.x % kLanes; }
  PYMOE_DEVICE bool inside(int32_t expert) const { return static_cast<uint32_t>(expert) < a_.num_experts; }
  PYMOE_DEVICE bool softmax() const { return a_.options.score == Score::kSoftmax; }
  // Returns true if the exponentials of the whole row must be summed. Renormalised softmax weights need only those of
  // the chosen experts, if the row's greatest logit is chosen.
  PYMOE_DEVICE bool sums_row() const {
    return kScoresRow && softmax() && !(a_.chooses_on_logits() && a_.options.renormalize);
  }

  // Fills the slots with the bits of the logits, and with -infinity past the end of the row.
  PYMOE_DEVICE void load_row() {
    with_logits<S>(a_, token_, [&](const auto* PYMOE_RESTRICT logits) {
      // In the larger kernels, the compiler would merge the bounds tests before and after a load into a single branch,
      // and move the load and the widening behind that branch. With kClamped there is no test before the load.
      constexpr bool kClamped = kScoresRow && sizeof(*logits) == 2;
      const auto bits = [&](Key, int32_t expert, int, auto logit) {
        return bit_cast<Key>(inside(expert) ? to_accumulate(logit) : -std::numeric_limits<S>::infinity());
      };
      if (kScoresRow && !a_.chooses_on_logits()) {
        row_.template map_with_two<kClamped>(logits, static_cast<const S*>(a_.bias), bits);
      } else {
        row_.template map_with<kClamped>(logits, bits);
      }
    });
  }

  // Replaces the logits in the slots with the keys that the choice compares.
  PYMOE_DEVICE void score_row() {
    if (sums_row()) {
      S local = -std::numeric_limits<S>::infinity();  // the greatest logit, ignoring NaN
      row_.each([&](Key slot, int32_t expert, int) {
        const S logit = bit_cast<S>(slot);
        if (inside(expert) && logit > local) local = logit;
      });
      greatest_ = value_of_key<S>(group_max<kLanes>(order_key(local)));
      LaneSum<S, kLanes> sum;
      const bool keep = !a_.chooses_on_logits();
      row_.map([&](Key slot, int32_t expert, int step) {
        const S e = inside(expert) ? exp_in_fixed_steps(bit_cast<S>(slot) - greatest_) : S{0};
        sum.add(e, step);
        return keep ? bit_cast<Key>(e) : slot;
      });
      sum_ = sum.total();
    }
    if (!kScoresRow || a_.chooses_on_logits()) {
      row_.map([&](Key slot, int32_t expert, int) {
        const Key key = order_key(bit_cast<S>(slot));  // computed for experts past the end, too, to avoid a branch
        return inside(expert) ? key : kNoKey<S>;
      });
      return;
    }
    if (kHeld > 0) __syncwarp();  // all lanes have read the scores of the token before
    // Without a bias, 0 is added, which changes no score, since none is -0.
    row_.map_with_second(static_cast<const S*>(a_.bias), [&](Key slot, int32_t expert, int, S bias) {
      const S value = bit_cast<S>(slot);
      const S score = softmax() ? value / sum_ : sigmoid_in_fixed_steps(value);
      if (kHeld > 0 && inside(expert)) row_scores_[expert] = score;
      return inside(expert) ? order_key(score + bias) : kNoKey<S>;
    });
    if (kHeld > 0) __syncwarp();  // all lanes have written their scores
    if (layout_.group_size > 0) keep_best_groups();
  }

  // Removes the experts of all groups except the best topk_groups from the choice: their keys become kNoKey.
  PYMOE_DEVICE void keep_best_groups() {
    const auto size = static_cast<uint32_t>(layout_.group_size), groups = static_cast<uint32_t>(a_.num_groups);
    if constexpr (kHeld > 0) {
      row_.each([&](Key key, int32_t expert, int) {
        if (inside(expert)) buffer_[expert] = key;
      });
    }
    __syncwarp();
    Key* group_keys = buffer_ + a_.num_experts;
    for (uint32_t group = lane(); group < groups; group += kLanes) {
      Key first = kNoKey<S>, second = first;
      uint32_t at = group % size;  // rotated, so that lanes begin in different banks
      for (uint32_t i = 0; i < size; ++i) {
        const Key key = buffer_[group * size + at];
        const Key lesser = key > first ? first : key;
        second = lesser > second ? lesser : second;
        first = key > first ? key : first;
        at = at + 1 == size ? 0 : at + 1;
      }
      S score = value_of_key<S>(first);
      if (size > 1) score += value_of_key<S>(second);
      group_keys[group] = order_key(score);
    }
    __syncwarp();
    for (uint32_t group = lane(); group < groups; group += kLanes) {
      const Key key = group_keys[group];
      uint32_t rank = 0;
      for (uint32_t other = 0; other < groups; ++other) {
        rank += group_keys[other] > key || (group_keys[other] == key && other < group);
      }
      if (rank < a_.topk_groups) continue;
      uint32_t at = group % size;
      for (uint32_t i = 0; i < size; ++i) {
        buffer_[group * size + at] = kNoKey<S>;
        at = at + 1 == size ? 0 : at + 1;
      }
    }
    __syncwarp();
    if constexpr (kHeld > 0) {
      row_.map([&](Key, int32_t expert, int) { return inside(expert) ? buffer_[expert] : kNoKey<S>; });
    }
  }

  // Returns the score of a chosen expert. For a softmax whose row is not summed (sums_row), returns e^(logit - best),
  // which differs from the score by a factor per token that renormalising removes.
  PYMOE_DEVICE S score_of(const Candidate<S>& candidate) const {
    if (kScoresRow && kHeld > 0 && !a_.chooses_on_logits()) return row_scores_[candidate.expert()];
    S logit;
    if (!kScoresRow || a_.chooses_on_logits()) {
      logit = value_of_key<S>(candidate.key());
    } else {
      with_logits<S>(a_, token_, [&](const auto* logits) { logit = to_accumulate(logits[candidate.expert()]); });
    }
    if (!softmax()) return sigmoid_in_fixed_steps(logit);
    const S e = exp_in_fixed_steps(logit - greatest_);
    return kScoresRow ? e / sum_ : e;
  }

  PYMOE_DEVICE S weight_of(S score, S divisor) const {
    return (a_.options.renormalize ? score / divisor : score) * static_cast<S>(a_.options.scale);
  }

  PYMOE_DEVICE void write_choice(int64_t choice, int32_t expert) const {
    if (!writes_) return;
    a_.experts[token_ * a_.choices + choice] = expert;
    if (layout_.counts_in_shared) {
      atomicAdd(counts_ + expert, 1);
    } else {
      atomicAdd(a_.load + expert, 1);
    }
  }
  PYMOE_DEVICE S* weights() const { return static_cast<S*>(a_.weights) + token_ * a_.choices; }

  PYMOE_DEVICE void finish_ranked(Key best, const Candidate<S>* chosen, S* scores) {
    if (!sums_row()) greatest_ = value_of_key<S>(best);
    const int choices = static_cast<int>(a_.choices);
    for (int choice = lane(); choice < choices; choice += kLanes) {
      scores[choice] = score_of(chosen[choice]);
      write_choice(choice, chosen[choice].expert());
    }
    __syncwarp();
    const S divisor = a_.options.renormalize ? floored_sum(sum_in_blocks(scores, choices)) : S{1};
    if (writes_) {
      for (int choice = lane(); choice < choices; choice += kLanes) {
        weights()[choice] = weight_of(scores[choice], divisor);
      }
    }
    __syncwarp();  // before the next token reuses the lists
  }

  // Chooses the experts one after the other, each by a pass over the row, and writes them and their weights. Lane
  // `choice % kLanes` writes a choice. Until the sum for renormalising is known, the score stays in a register, or in
  // the output if a lane has several choices.
  PYMOE_DEVICE void gate_by_passes() {
    auto previous = Candidate<S>::before_all();
    S total = 0, block = 0, mine = 0;
    for (int64_t choice = 0; choice < a_.choices; ++choice) {
      previous = next_best<S, kLanes>(row_, previous);
      if (choice == 0 && !sums_row()) greatest_ = value_of_key<S>(previous.key());
      const S score = score_of(previous);
      block += score;
      if (choice % kSumLanes == kSumLanes - 1) {
        total += block;
        block = 0;
      }
      if (choice % kLanes == lane()) {
        mine = score;
        write_choice(choice, previous.expert());
        if (writes_ && a_.choices > kLanes) weights()[choice] = score;
      }
    }
    if (!writes_) return;
    const S divisor = floored_sum(total + block);
    if (a_.choices <= kLanes) {
      if (lane() < a_.choices) weights()[lane()] = weight_of(mine, divisor);
      return;
    }
    for (int64_t choice = lane(); choice < a_.choices; choice += kLanes) {
      weights()[choice] = weight_of(weights()[choice], divisor);
    }
  }

  const GateTopkArguments& a_;
  const Layout& layout_;
  const int64_t token_;
  const bool writes_;
  int32_t* const counts_;
  Key* const buffer_;
  S* const row_scores_;  // scores of a row that is held in registers, if the choice is not made on logits
  S greatest_ = 0;       // the greatest logit
  S sum_ = 1;            // the sum of e^(logit - greatest) over the row, if needed
  HeldRow<S, kLanes, kHeld> row_;
};

// Number of blocks that must fit on a multiprocessor together. To make room for a third, nvcc 13 would spill registers
// to local memory on sm_120.
inline constexpr int kResident = 2;

template <typename S, int kLanes, int kHeld, bool kScoresRow>
__global__ void __launch_bounds__(kThreads, kResident)
    gate_topk_kernel(const GateTopkArguments a, const Layout layout) {
  PYMOE_DYNAMIC_SHARED(unsigned char, memory);
  const int tokens = blockDim.x / kLanes, slot = threadIdx.x / kLanes;
  unsigned char* next = memory;
  const auto array = [&](auto element, int64_t count) {  // this token's part of an array
    auto* const first = reinterpret_cast<decltype(element)*>(next);
    next += tokens * count * static_cast<int64_t>(sizeof(element));
    return first + slot * count;
  };
  const int64_t places = layout.capacity > 0 ? a.choices : 0;
  auto* const list = array(Candidate<S>{}, layout.capacity);
  auto* const chosen = array(Candidate<S>{}, places);
  auto* const scores = array(S{}, places);
  auto* buffer = array(order_key_t<S>{}, layout.rows == nullptr ? layout.row_keys : 0);
  if (layout.rows != nullptr) {
    buffer = static_cast<order_key_t<S>*>(layout.rows) +
             (static_cast<int64_t>(blockIdx.x) * tokens + slot) * layout.row_keys;
  }
  auto* const row_scores = array(S{}, layout.row_scores);
  auto* const counts = reinterpret_cast<int32_t*>(next);
  if (layout.counts_in_shared) {
    for (int expert = threadIdx.x; expert < static_cast<int>(a.num_experts); expert += blockDim.x) counts[expert] = 0;
    __syncthreads();
  }
  const int first = static_cast<int>(blockIdx.x) * layout.each;
  for (int tile = first; tile < min(first + layout.each, layout.tiles); ++tile) {
    const int64_t token = static_cast<int64_t>(tile) * tokens + slot;
    // Groups past the last token repeat that token without writing, because the warp's collectives need all lanes.
    Token<S, kLanes, kHeld, kScoresRow>(a, layout, min(token, a.tokens - 1), token < a.tokens, buffer, row_scores,
                                        counts)
        .gate(list, chosen, scores);
  }
  if (!layout.counts_in_shared) return;
  __syncthreads();  // all have counted
  const int experts = static_cast<int>(a.num_experts);
  if (a.counts.values != nullptr) {
    const int stride = static_cast<int>(a.counts.stride);
    uint16_t* const written = a.counts.values + static_cast<int64_t>(blockIdx.x) * stride;
    for (int expert = threadIdx.x; expert < stride; expert += blockDim.x) {
      written[expert] = expert < experts ? static_cast<uint16_t>(counts[expert]) : uint16_t{0};
    }
  } else {
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
      const int32_t count = counts[expert];
      if (gridDim.x == 1) {
        a.load[expert] = count;
      } else if (count != 0) {
        atomicAdd(a.load + expert, count);
      }
    }
  }
}

struct Plan {
  LaunchShape shape;
  Layout layout;
  int64_t tokens;  // per tile
  int64_t workspace_bytes = 0;
};

// The template arguments of a kernel. with_kernel selects the kernel for a call, and calls f with its template
// arguments.
template <typename Sums, int kGroup, int kSlots, bool kWholeRow>
struct Kernel {
  using S = Sums;
  static constexpr int kLanes = kGroup, kHeld = kSlots;
  static constexpr bool kScoresRow = kWholeRow;
};

template <typename F>
auto with_kernel(const GateTopkArguments& a, const F& f) {
  if (a.dtype == DType::kFloat64) return f(Kernel<double, kWarp, 0, true>{});
  const bool chosen_alone = a.chooses_on_logits() && (a.options.score == Score::kSigmoid || a.options.renormalize);
  if (a.num_experts > (chosen_alone ? kHeldExperts : kHeldScores)) return f(Kernel<float, kWarp, 0, true>{});
  if (!chosen_alone) {
    if (a.num_experts <= 128 && a.tokens <= kFewTokens) return f(Kernel<float, 16, 8, true>{});
    if (a.num_experts <= 128) return f(Kernel<float, 8, 16, true>{});
    return f(Kernel<float, 16, 16, true>{});
  }
  if (a.num_experts <= 32) return f(Kernel<float, 4, 8, false>{});
  if (a.num_experts <= 64) return f(Kernel<float, 8, 8, false>{});
  if (a.num_experts <= 128) return f(Kernel<float, 8, 16, false>{});
  if (a.num_experts <= 256) return f(Kernel<float, 16, 16, false>{});
  return f(Kernel<float, kWarp, 16, false>{});
}

// Returns the plan of a call. `counted`: whether its blocks write their counts for build_routing.
template <typename K>
Plan plan_of(const GateTopkArguments& a, bool counted) {
  using S = typename K::S;
  constexpr int kLanes = K::kLanes;
  constexpr int64_t kMaxima = Token<S, kLanes, K::kHeld, K::kScoresRow>::kMaxima;
  Layout layout{};
  const bool ranked = a.choices > 2 && a.choices <= kLanes * kMaxima;
  // An odd number, so that the lists of a warp's tokens begin in different banks.
  layout.capacity = ranked ? static_cast<int32_t>(std::max<int64_t>(4 * a.choices, 32) + 1) : 0;
  layout.group_size = a.num_groups > 0 ? static_cast<int32_t>(a.num_experts / a.num_groups) : 0;
  if (K::kHeld == 0 || a.num_groups > 0) layout.row_keys = a.num_experts + a.num_groups;
  if (K::kHeld > 0 && K::kScoresRow && !a.chooses_on_logits()) {
    layout.row_scores = ceil_div(a.num_experts, kWarp) * kWarp + kLanes;  // a warp's tokens begin in different banks
  }
  layout.counts_in_shared = a.num_experts <= kMostCounted;

  const int64_t counts = layout.counts_in_shared ? a.num_experts * int64_t{sizeof(int32_t)} : 0;
  const int64_t lists = layout.capacity * int64_t{sizeof(Candidate<S>)} +
                        (ranked ? a.choices : 0) * int64_t{sizeof(Candidate<S>) + sizeof(S)};
  const int64_t rows = layout.row_keys * int64_t{sizeof(S)};
  const bool rows_in_shared = kWarp / kLanes * (lists + rows) + counts <= kMostSharedBytes;
  const int64_t token_bytes = lists + (rows_in_shared ? rows : 0) + layout.row_scores * int64_t{sizeof(S)};
  int threads = kThreads;
  while (threads > kWarp && threads / kLanes * token_bytes + counts > kUsualSharedBytes) threads /= 2;
  const int64_t tokens = threads / kLanes;
  const int64_t tiles = ceil_div(a.tokens, tokens);
  int64_t blocks = std::min(tiles, a.most_blocks > 0 ? a.most_blocks : counted ? kCountedBlocks : kBlocks);
  if (!rows_in_shared) blocks = std::clamp<int64_t>(kMostBuffered / (tokens * rows), 1, blocks);
  const int64_t each = blocks == 0 ? 1 : ceil_div(tiles, blocks);
  blocks = ceil_div(tiles, each);
  layout.tiles = static_cast<int32_t>(tiles);
  layout.each = static_cast<int32_t>(each);
  Plan plan{{blocks, threads, std::max<int64_t>(tokens * token_bytes + counts, 1)}, layout, tokens};
  if (!rows_in_shared) plan.workspace_bytes = blocks * tokens * rows;
  return plan;
}

template <typename K>
void gate(const GateTopkArguments& a, void* stream) {
  const bool counted = a.counts.values != nullptr;
  Plan plan = plan_of<K>(a, counted);
  if (plan.workspace_bytes > 0) plan.layout.rows = a.workspace;
  if (!counted && (plan.shape.blocks != 1 || !plan.layout.counts_in_shared)) {
    clear(kName, a.load, a.num_experts * int64_t{sizeof(int32_t)}, stream);
  }
  launch(kName, gate_topk_kernel<typename K::S, K::kLanes, K::kHeld, K::kScoresRow>, plan.shape, stream, a,
         plan.layout);
}

}  // namespace

int64_t gate_topk_workspace(const GateTopkArguments& a) {
  return with_kernel(a, [&](auto kernel) { return plan_of<decltype(kernel)>(a, false).workspace_bytes; });
}

ChoiceCounts gate_topk_counts(const GateTopkArguments& a) {
  if (a.tokens > ChoiceCounts::kMostTokens || a.num_experts > ChoiceCounts::kMostExperts) return {};
  const Plan plan = with_kernel(a, [&](auto kernel) { return plan_of<decltype(kernel)>(a, true); });
  constexpr int64_t kPack = ChoiceCounts::kCountPack;
  return {nullptr, plan.shape.blocks, plan.layout.each * plan.tokens, ceil_div(a.num_experts, kPack) * kPack};
}

void gate_topk(const GateTopkArguments& a, void* stream) {
  with_kernel(a, [&](auto kernel) { gate<decltype(kernel)>(a, stream); });
}

}  // namespace pymoe::cuda
