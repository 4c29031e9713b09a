// Checks of the indices that are passed to a CPU kernel, which trusts none of them. The error messages are those of
// pymoe.reference.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/macros.h"

namespace pymoe::cpu {

// Throws std::out_of_range with the message "OPERATOR: RULE (NAME = LIMIT), got INDEX at [TOKEN, CHOICE]". `rule` is
// the message's text up to and including "NAME = "; `place` is the index of the choice among the choices of all tokens.
[[noreturn]] inline void throw_bad_index(const std::string& operator_name, const char* rule, int64_t limit,
                                         int64_t index, int64_t place, int64_t choices) {
  throw std::out_of_range(operator_name + ": " + rule + std::to_string(limit) + "), got " + std::to_string(index) +
                          " at [" + std::to_string(place / choices) + ", " + std::to_string(place % choices) + "]");
}

[[noreturn]] inline void throw_bad_expert(const char* operator_name, int64_t num_experts, int64_t expert, int64_t place,
                                          int64_t choices) {
  throw_bad_index(operator_name, "experts must lie in [0, E) (E = ", num_experts, expert, place, choices);
}

// Returns the slot of the choice at index `place`. Throws std::out_of_range unless it is -1 or lies in [0, rows).
PYMOE_INLINE int64_t checked_slot(const char* operator_name, const int32_t* slots, int64_t place, int64_t choices,
                                  int64_t rows) {
  const int64_t slot = slots[place];
  if (slot < -1 || slot >= rows) {
    throw_bad_index(operator_name, "routing.slot must lie in [-1, S) (S = ", rows, slot, place, choices);
  }
  return slot;
}

}  // namespace pymoe::cpu
