// Checks the offsets of experts' rows that are passed to a CPU kernel. The error messages are those of pymoe.reference.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pymoe::cpu {

// Throws std::invalid_argument unless the `experts` + 1 offsets start at 0 and do not decrease, and std::out_of_range
// if they exceed `rows`. `argument` is the name of the offsets in error messages.
inline void check_offsets(const std::string& operator_name, const int32_t* offsets, int64_t experts, int64_t rows,
                          const std::string& argument = "offsets") {
  const auto name = [](int64_t value) { return std::to_string(value); };
  if (offsets[0] != 0) {
    throw std::invalid_argument(operator_name + ": " + argument + " must start at 0, got " + name(offsets[0]));
  }
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (offsets[expert + 1] < offsets[expert]) {
      throw std::invalid_argument(operator_name + ": " + argument + " must not decrease, got " +
                                  name(offsets[expert + 1]) + " after " + name(offsets[expert]) + " at index " +
                                  name(expert + 1));
    }
  }
  if (offsets[experts] > rows) {
    throw std::out_of_range(operator_name + ": " + argument + " must lie in [0, S] (S = " + name(rows) + "), got " +
                            name(offsets[experts]));
  }
}

}  // namespace pymoe::cpu
