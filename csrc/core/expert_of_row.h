// Finds the expert that owns a row, among rows that are sorted by expert.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace pymoe {

// The biases of experts, (E, N), for an operator that adds them to its rows: bias e to the rows r of expert e,
// offsets[e] <= r < offsets[e + 1]. If `data` is null, nothing is added.
struct ExpertBiases {
  const void* data = nullptr;
  const int32_t* offsets = nullptr;  // (E + 1,)
  int64_t experts = 0;
};

// Returns the first expert whose rows end after `row`: its owner. Returns `experts` for a row from offsets[experts] on,
// which no expert owns. The result is in 0..experts for any values of the offsets.
PYMOE_HOST_DEVICE PYMOE_INLINE int64_t expert_of_row(const int32_t* offsets, int64_t experts, int64_t row) {
  int64_t first = 0, count = experts;
  while (count > 0) {
    const int64_t half = count / 2;
    const bool before = offsets[first + half + 1] <= row;
    first = before ? first + half + 1 : first;
    count = before ? count - half - 1 : half;
  }
  return first;
}

// Returns the bias of `row`, an array of N = `features` elements, or null if no expert owns the row. biases.data must
// not be null.
template <typename T>
PYMOE_HOST_DEVICE PYMOE_INLINE const T* bias_of_row(const ExpertBiases& biases, int64_t row, int64_t features) {
  const int64_t expert = expert_of_row(biases.offsets, biases.experts, row);
  return expert < biases.experts ? static_cast<const T*>(biases.data) + expert * features : nullptr;
}

}  // namespace pymoe
