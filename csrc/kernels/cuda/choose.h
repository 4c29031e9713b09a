// Chooses the best K keys of a row with a group of lanes. The choice is exact, and ties go to the lower index.
#pragma once

#include <cstdint>

#include "core/order.h"
#include "kernels/cuda/lane_group.h"

namespace pymoe::cuda {

// A key (core/order.h) with its expert. No two candidates of a token are equal, so they have a definite order.
template <typename S>
struct Candidate {
  order_key_t<S> order;
  int32_t id;

  PYMOE_DEVICE static Candidate of(order_key_t<S> key, int32_t expert) { return {key, expert}; }
  PYMOE_DEVICE static Candidate before_all() { return {std::numeric_limits<order_key_t<S>>::max(), -1}; }
  PYMOE_DEVICE order_key_t<S> key() const { return order; }
  PYMOE_DEVICE int32_t expert() const { return id; }
  PYMOE_DEVICE bool before(const Candidate& other) const {
    return order > other.order || (order == other.order && id < other.id);
  }
  PYMOE_DEVICE Candidate of_lane(int distance) const {
    return {__shfl_xor_sync(kFullWarp, order, distance), __shfl_xor_sync(kFullWarp, id, distance)};
  }
};

// Packs a candidate with a 32-bit key into one integer, which is greater for candidates that come first.
template <>
struct Candidate<float> {
  int64_t rank;

  PYMOE_DEVICE static Candidate of(int32_t key, int32_t expert) {
    return {static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(key)) << 32 |
                                 static_cast<uint32_t>(INT32_MAX - expert))};
  }
  PYMOE_DEVICE static Candidate before_all() { return {INT64_MAX}; }
  PYMOE_DEVICE int32_t key() const { return static_cast<int32_t>(rank >> 32); }
  PYMOE_DEVICE int32_t expert() const { return INT32_MAX - static_cast<int32_t>(rank); }
  PYMOE_DEVICE bool before(const Candidate& other) const { return rank > other.rank; }
  PYMOE_DEVICE Candidate of_lane(int distance) const { return {__shfl_xor_sync(kFullWarp, rank, distance)}; }
};

// Below, a "Row" is any type with a function each(f), which calls f(key, expert, step) for the elements of the calling
// lane: expert = lane + n * kLanes, and step is a compile-time number that grows by one from call to call (and
// sometimes restarts at 0). Every lane makes the same number of calls; past the row's end the key is kNoKey.

// Returns the best candidate of a row that comes after `previous`, in every lane of the group. If there is none, the
// key is kNoKey.
template <typename S, int kLanes, typename Row>
PYMOE_DEVICE Candidate<S> next_best(const Row& row, const Candidate<S>& previous) {
  Candidate<S> best = Candidate<S>::of(kNoKey<S>, 0);
  row.each([&](order_key_t<S> key, int32_t expert, int) {
    const auto candidate = Candidate<S>::of(key, expert);
    if (candidate.before(best) && previous.before(candidate)) best = candidate;
  });
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Candidate<S> other = best.of_lane(distance);
    if (other.before(best)) best = other;
  }
  return best;
}

// Writes the best `choices` <= kLanes * kMaxima of a row to `chosen`, best first, and returns the greatest key; or
// returns kNoKey in all lanes of the warp if a row of the warp has more candidates than `list` has room for.
//
// Every lane keeps the maxima of kMaxima parts of its elements. The K-th greatest of these maxima is a lower bound: at
// least K keys reach it, so no smaller key is among the best K. The remaining candidates, little more than K of a row
// in random order, are gathered, and each counts how many come before it: this count is its rank.
template <typename S, int kLanes, int kMaxima, typename Row>
PYMOE_DEVICE order_key_t<S> choose_by_rank(const Row& row, int choices, Candidate<S>* list, int capacity,
                                           Candidate<S>* chosen) {
  using Key = order_key_t<S>;
  const int lane = threadIdx.x % kLanes;
  Key maxima[kMaxima];
#pragma unroll
  for (int i = 0; i < kMaxima; ++i) maxima[i] = kNoKey<S>;
  row.each([&](Key key, int32_t, int step) {
    Key& greatest = maxima[step % kMaxima];
    greatest = key > greatest ? key : greatest;
  });
  sort_descending<kLanes, kMaxima>(maxima);
  const int place = (choices - 1) % kMaxima;
  Key bound = maxima[0];
#pragma unroll
  for (int i = 1; i < kMaxima; ++i) bound = i == place ? maxima[i] : bound;
  bound = __shfl_sync(kFullWarp, bound, (choices - 1) / kMaxima, kLanes);
  bound = bound == kNoKey<S> ? bound + 1 : bound;  // some parts have no elements
  const Key greatest = __shfl_sync(kFullWarp, maxima[0], 0, kLanes);

  int mine = 0;
  row.each([&](Key key, int32_t, int) { mine += key >= bound; });
  const int until = scan_lanes<kLanes>(mine, lane, Sum{});  // number of candidates in this lane and the lanes before it
  const int count = __shfl_sync(kFullWarp, until, kLanes - 1, kLanes);
  if (__any_sync(kFullWarp, count > capacity)) return kNoKey<S>;
  Candidate<S>* next = list + (until - mine);
  row.each([&](Key key, int32_t expert, int) {
    if (key >= bound) *next++ = Candidate<S>::of(key, expert);
  });
  __syncwarp();

  for (int i = lane; i < count; i += 2 * kLanes) {  // two candidates at a time, which halves the reads
    const Candidate<S> a = list[i], b = list[i + kLanes < count ? i + kLanes : i];
    int place_a = 0, place_b = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const Candidate<S> other = list[j];
      place_a += other.before(a);
      place_b += other.before(b);
    }
    if (place_a < choices) chosen[place_a] = a;
    if (place_b < choices) chosen[place_b] = b;
  }
  __syncwarp();
  return greatest;
}

}  // namespace pymoe::cuda
