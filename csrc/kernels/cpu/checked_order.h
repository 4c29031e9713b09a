// Checks the order of rows that is passed to a CPU kernel. The error messages are those of pymoe.reference.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace pymoe::cpu {

// Returns a flag for each row: 1 if the row is among the first `used` elements of `order`, else 0. Throws
// std::out_of_range unless these elements lie in [0, rows), and std::invalid_argument if two of them are equal.
inline std::vector<char> check_order(const std::string& operator_name, const int32_t* order, int64_t used,
                                     int64_t rows) {
  const auto place = [](int64_t at, int64_t row) { return std::to_string(row) + " at [" + std::to_string(at) + "]"; };
  std::vector<char> named(static_cast<size_t>(rows));
  for (int64_t at = 0; at < used; ++at) {
    const int64_t row = order[at];
    if (row < 0 || row >= rows) {
      throw std::out_of_range(operator_name + ": order must lie in [0, S) (S = " + std::to_string(rows) + "), got " +
                              place(at, row));
    }
    if (named[static_cast<size_t>(row)] != 0) {
      throw std::invalid_argument(operator_name + ": order must not name a row twice, got " + place(at, row) +
                                  " again");
    }
    named[static_cast<size_t>(row)] = 1;
  }
  return named;
}

}  // namespace pymoe::cpu
