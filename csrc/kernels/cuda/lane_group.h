// Joint operations of a group of kLanes lanes of a warp (a power of two): maximum, sum in core/score.h's order, sort.
// Lane l of a group holds elements l, l + kLanes, l + 2 kLanes, ... of a row. All 32 lanes of the warp must call these
// functions together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/score.h"
#include "kernels/cuda/launch.h"

namespace pymoe::cuda {

struct Sum {
  template <typename V>
  PYMOE_DEVICE V operator()(V a, V b) const {
    return a + b;
  }
};
struct Greatest {
  template <typename V>
  PYMOE_DEVICE V operator()(V a, V b) const {
    return b > a ? b : a;
  }
};

// Returns the result of `combine` over the values of all lanes, the same in each lane: lanes i and i + kLanes / 2 are
// combined first, and so on.
template <int kLanes, typename V, typename F>
PYMOE_DEVICE V reduce_lanes(V value, const F& combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Returns the inclusive scan: the result of `combine` over the values of the group's lanes up to the thread's own
// `lane`.
template <int kLanes, typename V, typename F>
PYMOE_DEVICE V scan_lanes(V value, int lane, const F& combine) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const V before = __shfl_up_sync(kFullWarp, value, distance, kLanes);
    if (lane >= distance) value = combine(before, value);
  }
  return value;
}

template <int kLanes, typename V>
PYMOE_DEVICE V group_max(V value) {
  if constexpr (kLanes == kWarp && std::is_same_v<V, int32_t>) {
    return __reduce_max_sync(kFullWarp, value);
  } else {
    return reduce_lanes<kLanes>(value, Greatest{});
  }
}

// The sum of a row in kSumLanes lanes. Call add() for elements l, l + kLanes, ... of lane l in order, with zeros past
// the row's end; `step` is the number of the call (and should be a compile-time constant). In groups of up to 16 lanes,
// each lane owns whole sum lanes. In groups of 32, two lanes share a sum lane, and both compute it.
template <typename S, int kLanes>
class LaneSum {
 public:
  PYMOE_DEVICE void add(S value, int step) {
    if constexpr (kLanes > kSumLanes) {
      static_assert(kLanes == 2 * kSumLanes);
      const S other = __shfl_xor_sync(kFullWarp, value, kSumLanes);
      const bool first = threadIdx.x % kLanes < kSumLanes;
      parts_[0] += first ? value : other;
      parts_[0] += first ? other : value;
    } else {
      parts_[step % kParts] += value;
    }
  }

  PYMOE_DEVICE S total() {
#pragma unroll
    for (int half = kParts / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) parts_[i] += parts_[i + half];
    }
    return reduce_lanes<(kLanes < kSumLanes ? kLanes : kSumLanes)>(parts_[0], Sum{});
  }

 private:
  static constexpr int kParts = kLanes < kSumLanes ? kSumLanes / kLanes : 1;
  S parts_[kParts] = {};
};

// Sorts kLanes * kEach keys, greatest first: key number i ends in lane i / kEach, at i % kEach. It is a bitonic network
// whose merges begin with a mirrored step, so that the lower position always keeps the greater key.
template <int kLanes, int kEach, typename Key>
PYMOE_DEVICE void sort_descending(Key (&keys)[kEach]) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int size = 2; size <= kLanes * kEach; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const bool mirrored = stride == size / 2;
      if (stride < kEach) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int j = mirrored ? i ^ (size - 1) : i ^ stride;
          if (i > j) continue;
          const Key a = keys[i], b = keys[j];
          keys[i] = a > b ? a : b;
          keys[j] = a > b ? b : a;
        }
      } else {
        Key others[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          others[i] = mirrored ? __shfl_xor_sync(kFullWarp, keys[kEach - 1 - i], size / kEach - 1)
                               : __shfl_xor_sync(kFullWarp, keys[i], stride / kEach);
        }
        const bool lower = (lane & (stride / kEach)) == 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) keys[i] = (others[i] > keys[i]) == lower ? others[i] : keys[i];
      }
    }
  }
}

}  // namespace pymoe::cuda
