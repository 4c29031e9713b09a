// The backward of the gate on the GPU. kernels/gate_topk_backward_cpu_body.h has the formulas; every operation and its
// order are the same here, so the gradients have the CPU twin's bits.
//
// A group of 16 lanes owns a token (one lane per lane of the sums in core/score.h); a block's tokens are consecutive.
// Rows of gradients are assembled in shared memory, or in the workspace if shared memory is too small: first the lanes
// write the gradients of unchosen experts everywhere, then the lane that owns a chosen element replaces it. Then the
// block writes its rows, one stretch of memory, once, in 16-byte stores (for any E, if a block has at least eight
// rows). For a renormalised softmax over logits, the usual gate, only the logits of the chosen experts are read: the
// kernel moves little more than the gradients that it writes.
#include <algorithm>

#include "kernels/cuda/lane_group.h"
#include "kernels/cuda/pack.h"
#include "kernels/gate_topk.h"

namespace pymoe::cuda {
namespace {

constexpr const char* kName = "gate_topk_backward";
constexpr int kThreads = 256;
constexpr int kLanes = kSumLanes;   // per token
constexpr int kValuesOfChoice = 3;  // buffered values per choice: score, gradient, a term of a sum

// Where a block assembles its rows of gradients.
struct Layout {
  void* rows;   // the buffers, one block after the other; null: they are in shared memory
  bool packed;  // true if a block's rows begin at multiples of 16 bytes
};

// One token, for which a group of lanes computes the gradients. Lane l owns elements l + n * kLanes of the row and of
// the choices.
template <typename T>
class Token {
  using S = accumulate_t<T>;

 public:
  PYMOE_DEVICE Token(const GateTopkBackwardArguments& a, int64_t token, S* grad, S* of_choices)
      : a_(a),
        row_(static_cast<const T*>(a.logits) + token * a.num_experts),
        experts_(a.experts + token * a.choices),
        grad_weights_(static_cast<const S*>(a.grad_weights) + token * a.choices),
        grad_(grad),
        chosen_(of_choices),
        delta_(of_choices + a.choices),
        terms_(of_choices + 2 * a.choices) {}

  PYMOE_DEVICE void backward() {
    const S scale = static_cast<S>(a_.options.scale);
    each_own_choice([&](int64_t j) { delta_[j] = inside(experts_[j]) ? grad_weights_[j] * scale : S{0}; });
    if (a_.options.score == Score::kSigmoid) {
      sigmoid_backward();
    } else if (a_.options.renormalize && a_.chosen_on_logits) {
      chosen_softmax_backward();
    } else {
      softmax_backward();
    }
  }

 private:
  PYMOE_DEVICE int lane() const { return threadIdx.x % kLanes; }
  PYMOE_DEVICE bool inside(int32_t expert) const { return expert >= 0 && expert < a_.num_experts; }
  PYMOE_DEVICE S logit(int64_t expert) const { return to_accumulate(row_[expert]); }

  // Calls f(choice) for the choices of this lane.
  template <typename F>
  PYMOE_DEVICE void each_own_choice(const F& f) const {
    for (int64_t j = lane(); j < a_.choices; j += kLanes) f(j);
  }

  // Calls f(element) for the elements of this lane.
  template <typename F>
  PYMOE_DEVICE void each_own_element(const F& f) const {
#pragma unroll 4
    for (int64_t i = lane(); i < a_.num_experts; i += kLanes) f(i);
  }

  // Replaces the gradients of the chosen experts, in the lanes that wrote them, with f(choice). If two choices name the
  // same expert, which only a caller's mistake can cause, the value of the last of these choices stays.
  template <typename F>
  PYMOE_DEVICE void replace_chosen(const F& f) const {
    for (int64_t j = 0; j < a_.choices; ++j) {
      const int32_t expert = experts_[j];
      if (inside(expert) && expert % kLanes == lane()) grad_[expert] = f(j);
    }
  }

  PYMOE_DEVICE S sum_of_terms() const {
    S sum = 0;
    for (int64_t j = 0; j < a_.choices; ++j) sum += terms_[j];
    return sum;
  }

  // Turns the gradients of the weights, delta_, into gradients of the chosen scores. Returns the sum over the choices
  // of score times gradient.
  PYMOE_DEVICE S chosen_gradients() {
    __syncwarp();
    S divisor = 1, inner = 0;
    if (a_.options.renormalize) {
      const S sum = sum_in_blocks(chosen_, a_.choices);
      divisor = floored_sum(sum);
      each_own_choice([&](int64_t j) { terms_[j] = delta_[j] * (chosen_[j] / divisor); });
      __syncwarp();
      if (!(sum < static_cast<S>(kScoreSumFloor))) inner = sum_of_terms();
      __syncwarp();
    }
    each_own_choice([&](int64_t j) {
      delta_[j] = (delta_[j] - inner) / divisor;
      terms_[j] = chosen_[j] * delta_[j];
    });
    __syncwarp();
    return sum_of_terms();
  }

  // Computes the gradients for a renormalised softmax if the best expert is among the chosen. The gradients of experts
  // that are not chosen are 0, or NaN if the scores are NaN.
  PYMOE_DEVICE void chosen_softmax_backward() {
    int64_t first = 0;
    while (first < a_.choices && !inside(experts_[first])) ++first;
    const S greatest = first < a_.choices ? logit(experts_[first]) : S{0};
    each_own_choice([&](int64_t j) {
      chosen_[j] = inside(experts_[j]) ? exp_in_fixed_steps(logit(experts_[j]) - greatest) : S{0};
    });
    __syncwarp();
    const S sum = sum_in_blocks(chosen_, a_.choices);
    __syncwarp();
    each_own_choice([&](int64_t j) {
      chosen_[j] = chosen_[j] / sum;
      terms_[j] = delta_[j] * chosen_[j];
    });
    __syncwarp();
    const S inner = sum_of_terms();
    const S rest = sum * S{0};  // 0, or NaN if the token's scores are NaN, which must not be hidden
    each_own_element([&](int64_t i) { grad_[i] = rest; });
    replace_chosen([&](int64_t j) { return (delta_[j] - inner) * chosen_[j]; });
  }

  PYMOE_DEVICE void softmax_backward() {
    S local = -std::numeric_limits<S>::infinity();  // the greatest logit, ignoring NaN
    each_own_element([&](int64_t i) {
      const S value = logit(i);
      local = value > local ? value : local;
    });
    const S greatest = group_max<kLanes>(local);
    LaneSum<S, kLanes> lanes;
    each_own_element([&](int64_t i) {
      const S e = exp_in_fixed_steps(logit(i) - greatest);
      grad_[i] = e;
      lanes.add(e, 0);
    });
    const S sum = lanes.total();
    each_own_element([&](int64_t i) { grad_[i] = grad_[i] / sum; });  // grad_ now holds the scores
    __syncwarp();
    each_own_choice([&](int64_t j) { chosen_[j] = inside(experts_[j]) ? grad_[experts_[j]] : S{0}; });
    const S through = chosen_gradients();
    each_own_element([&](int64_t i) { grad_[i] = grad_[i] * (S{0} - through); });
    replace_chosen([&](int64_t j) { return chosen_[j] * (delta_[j] - through); });
  }

  PYMOE_DEVICE void sigmoid_backward() {
    each_own_choice(
        [&](int64_t j) { chosen_[j] = inside(experts_[j]) ? sigmoid_in_fixed_steps(logit(experts_[j])) : S{0}; });
    chosen_gradients();
    each_own_element([&](int64_t i) {
      const S value = logit(i);
      grad_[i] = value != value ? value : S{0};
    });
    replace_chosen([&](int64_t j) { return delta_[j] * (S{1} - chosen_[j]) * chosen_[j]; });
  }

  const GateTopkBackwardArguments& a_;
  const T* const PYMOE_RESTRICT row_;
  const int32_t* const experts_;
  const S* const grad_weights_;
  S* const grad_;    // (E,) the gradients to be written
  S* const chosen_;  // (K,) scores of the chosen
  S* const delta_;   // (K,) gradients of these scores
  S* const terms_;   // (K,)
};

// Rounds the `count` values at `rows` and writes them to `target`. All threads of the block must call this. `packed`:
// true if `target` is aligned for 16-byte stores.
template <typename T>
PYMOE_DEVICE void write_rows(const accumulate_t<T>* rows, int64_t count, T* target, bool packed) {
  using P = Chunk<T>;
  const int64_t packs = packed ? count / P::kSize : 0;
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    P pack;
#pragma unroll
    for (int j = 0; j < P::kSize; ++j) pack[j] = round_to<T>(rows[i * P::kSize + j]);
    store_pack(target + i * P::kSize, pack);
  }
  for (int64_t i = packs * P::kSize + threadIdx.x; i < count; i += blockDim.x) target[i] = round_to<T>(rows[i]);
}

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    gate_topk_backward_kernel(const GateTopkBackwardArguments a, const Layout layout) {
  using S = accumulate_t<T>;
  PYMOE_DYNAMIC_SHARED(S, memory);
  const int64_t tokens = blockDim.x / kLanes, slot = threadIdx.x / kLanes;
  const int64_t first = blockIdx.x * tokens, token = first + slot;
  const int64_t of_choices = kValuesOfChoice * a.choices;
  S* const rows = layout.rows == nullptr
                      ? memory
                      : static_cast<S*>(layout.rows) + blockIdx.x * tokens * (a.num_experts + of_choices);
  // Groups past the last token repeat that token without writing, because the warp's collectives need all lanes.
  Token<T>(a, min(token, a.tokens - 1), rows + slot * a.num_experts, rows + tokens * a.num_experts + slot * of_choices)
      .backward();
  __syncthreads();
  write_rows(rows, min(tokens, a.tokens - first) * a.num_experts,
             static_cast<Out*>(a.grad_logits) + first * a.num_experts, layout.packed);
}

struct Plan {
  LaunchShape shape;
  int64_t workspace_bytes = 0;
};

template <typename S>
Plan plan_of(const GateTopkBackwardArguments& a) {
  const int64_t token_bytes = (a.num_experts + kValuesOfChoice * a.choices) * int64_t{sizeof(S)};
  int threads = kThreads;
  while (threads > kWarp && threads / kLanes * token_bytes > kUsualSharedBytes) threads /= 2;
  const int64_t tokens = threads / kLanes, blocks = ceil_div(a.tokens, tokens);
  if (tokens * token_bytes <= kMostSharedBytes) return {{blocks, threads, tokens * token_bytes}};
  return {{blocks, threads, 1}, blocks * tokens * token_bytes};
}

template <typename T, typename Out>
void backward(const GateTopkBackwardArguments& a, void* stream) {
  const Plan plan = plan_of<accumulate_t<T>>(a);
  const int64_t block_bytes = plan.shape.threads / kLanes * a.num_experts * int64_t{sizeof(Out)};
  const Layout layout{plan.workspace_bytes > 0 ? a.workspace : nullptr,
                      widest_access({a.grad_logits}, block_bytes) == 16};
  launch(kName, gate_topk_backward_kernel<T, Out>, plan.shape, stream, a, layout);
}

}  // namespace

int64_t gate_topk_backward_workspace(const GateTopkBackwardArguments& a) {
  return (a.dtype == DType::kFloat64 ? plan_of<double>(a) : plan_of<float>(a)).workspace_bytes;
}

void gate_topk_backward(const GateTopkBackwardArguments& a, void* stream) {
  visit_gate_backward(a, [&]<typename T, typename Out>(TypeTag<T>, TypeTag<Out>) { backward<T, Out>(a, stream); });
}

}  // namespace pymoe::cuda
