// A row of the router's logits, scores or keys, held by a group of kLanes lanes: in registers, or in a buffer.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/order.h"
#include "kernels/cuda/launch.h"

namespace pymoe::cuda {

// Returns values[expert]. Past the row's end, returns another of the values if kClamped, else V{}. Without kClamped,
// `values` may be null; then returns V{}.
template <bool kClamped, typename V>
PYMOE_DEVICE V value_near(const V* PYMOE_RESTRICT values, uint32_t expert, uint32_t size) {
  if constexpr (kClamped) return values[min(expert, size - 1)];
  return values != nullptr && expert < size ? values[expert] : V{};
}

// A row in registers, one slot per element. Its functions visit the elements of the calling lane.
template <typename S, int kLanes, int kHeld>
struct HeldRow {
  order_key_t<S> slots[kHeld];
  S seconds[kHeld];  // loaded by map_with_two together with the first values
  uint32_t size;

  PYMOE_DEVICE HeldRow(uint32_t experts, order_key_t<S>*) : size(experts) {}
  PYMOE_DEVICE static uint32_t expert_of(int i) { return threadIdx.x % kLanes + i * kLanes; }

  // Sets slot = f(slot, expert, step) for all slots of the lane, including those past the row's end.
  template <typename F>
  PYMOE_DEVICE void map(const F& f) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) slots[i] = f(slots[i], static_cast<int32_t>(expert_of(i)), i);
  }
  // Sets slot = f(slot, expert, step, values[expert]) for all slots of the lane. All loads are issued before f uses the
  // first value; otherwise each conversion would wait for its load before the next load is issued.
  template <bool kClamped, typename V, typename F>
  PYMOE_DEVICE void map_with(const V* PYMOE_RESTRICT values, const F& f) {
    V loaded[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) loaded[i] = value_near<kClamped>(values, expert_of(i), size);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) slots[i] = f(slots[i], static_cast<int32_t>(expert_of(i)), i, loaded[i]);
  }
  // Does the same as map_with, and issues the loads of `others` together with those of `values`. A later
  // map_with_second passes these elements of `others` to its f.
  template <bool kClamped, typename V, typename F>
  PYMOE_DEVICE void map_with_two(const V* PYMOE_RESTRICT values, const S* PYMOE_RESTRICT others, const F& f) {
    V loaded[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) loaded[i] = value_near<kClamped>(values, expert_of(i), size);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) seconds[i] = value_near<false>(others, expert_of(i), size);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) slots[i] = f(slots[i], static_cast<int32_t>(expert_of(i)), i, loaded[i]);
  }
  template <typename F>
  PYMOE_DEVICE void map_with_second(const S*, const F& f) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) slots[i] = f(slots[i], static_cast<int32_t>(expert_of(i)), i, seconds[i]);
  }
  template <typename F>
  PYMOE_DEVICE void each(const F& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) f(slots[i], static_cast<int32_t>(expert_of(i)), i);
  }
};

// A row in a buffer, for any number of experts: kHeld = 0.
template <typename S, int kLanes>
struct HeldRow<S, kLanes, 0> {
  static constexpr int kAtOnce = 8;
  order_key_t<S>* buffer;
  uint32_t size;

  PYMOE_DEVICE HeldRow(uint32_t experts, order_key_t<S>* row) : buffer(row), size(experts) {}

  template <typename F>
  PYMOE_DEVICE void map(const F& f) {
    each_stretch([&](uint32_t first) {
      order_key_t<S> slots[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t expert = first + i * kLanes;
        slots[i] = f(slot_of(expert), static_cast<int32_t>(expert), i);
      }
      store(first, slots);
    });
  }
  template <bool kClamped, typename V, typename F>
  PYMOE_DEVICE void map_with(const V* PYMOE_RESTRICT values, const F& f) {
    each_stretch([&](uint32_t first) {
      V loaded[kAtOnce];
      order_key_t<S> slots[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) loaded[i] = value_near<kClamped>(values, first + i * kLanes, size);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t expert = first + i * kLanes;
        slots[i] = f(slot_of(expert), static_cast<int32_t>(expert), i, loaded[i]);
      }
      store(first, slots);
    });
  }
  template <bool kClamped, typename V, typename F>
  PYMOE_DEVICE void map_with_two(const V* PYMOE_RESTRICT values, const S*, const F& f) {
    map_with<kClamped>(values, f);
  }
  template <typename F>
  PYMOE_DEVICE void map_with_second(const S* PYMOE_RESTRICT others, const F& f) {
    map_with<false>(others, f);
  }
  template <typename F>
  PYMOE_DEVICE void each(const F& f) const {
    each_stretch([&](uint32_t first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t expert = first + i * kLanes;
        f(slot_of(expert), static_cast<int32_t>(expert), i);
      }
    });
  }

 private:
  // Calls f(first) for each stretch of kAtOnce experts of this lane: experts first, first + kLanes, first + 2 * kLanes,
  // ...
  template <typename F>
  PYMOE_DEVICE void each_stretch(const F& f) const {
    for (uint32_t first = threadIdx.x % kLanes, begin = 0; begin < size; begin += kAtOnce * kLanes) f(begin + first);
  }
  PYMOE_DEVICE order_key_t<S> slot_of(uint32_t expert) const { return expert < size ? buffer[expert] : kNoKey<S>; }
  PYMOE_DEVICE void store(uint32_t first, const order_key_t<S> (&slots)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t expert = first + i * kLanes;
      if (expert < size) buffer[expert] = slots[i];
    }
  }
};

}  // namespace pymoe::cuda
