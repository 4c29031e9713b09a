// The order in which experts are chosen, as an order of integer keys.
//
// order_key(x) is greater for values that are chosen first. Numbers are ordered by value, with -0 equal to +0; every
// NaN is above all numbers and equal to every other NaN. The smallest integer is not the key of any value, so it can
// mean "nothing yet". 16-bit floats are ordered by their values as float. Ties between keys go to the lower index.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "core/macros.h"

namespace pymoe {

// The integer type of keys, for values of the accumulated type S (float or double).
template <typename S>
using order_key_t = std::conditional_t<sizeof(S) == 8, int64_t, int32_t>;

template <typename S>
inline constexpr order_key_t<S> kNoKey = std::numeric_limits<order_key_t<S>>::min();

template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE order_key_t<S> order_key(S value) {
  using Key = order_key_t<S>;
  constexpr Key kMagnitude = std::numeric_limits<Key>::max();
  const Key bits = bit_cast<Key>(value + S{0});  // -0 + 0 = +0
  const Key key = bits < 0 ? bits ^ kMagnitude : bits;
  return value != value ? kMagnitude : key;
}

// Inverts order_key: exact, except that -0 becomes +0 and a NaN loses its payload.
template <typename S>
PYMOE_HOST_DEVICE PYMOE_INLINE S value_of_key(order_key_t<S> key) {
  return bit_cast<S>(key < 0 ? key ^ std::numeric_limits<order_key_t<S>>::max() : key);
}

}  // namespace pymoe
