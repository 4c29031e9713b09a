// The errors of the results of kernels, compared with sums in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "buffer.h"
#include "core/dtype.h"

namespace pymoe::test {

// Returns the larger of two errors. NaN is infinite: std::fmax would drop it.
inline double larger(double worst, double error) {
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : std::fmax(worst, error);
}

// Returns the largest error of the results (S, columns), each divided by 1 plus the sum of the magnitudes of its terms,
// to which rounding errors are proportional. Rows past offsets[experts] have no expert and must be zero.
// terms(row, expert, column, add) calls add(term) for every term, and returns what is added to their sum.
template <typename T, typename Terms>
double worst_error(const Buffer<T>& results, const std::vector<int32_t>& offsets, int64_t rows, int64_t columns,
                   const Terms& terms) {
  const auto experts = static_cast<int64_t>(offsets.size()) - 1;
  double worst = 0;
  int64_t expert = 0;
  for (int64_t r = 0; r < rows; ++r) {
    while (expert < experts && r >= offsets[static_cast<size_t>(expert + 1)]) ++expert;
    for (int64_t column = 0; column < columns; ++column) {
      double expected = 0, size = expert < experts ? 1 : 1e-9;
      if (expert < experts) {
        const double added = terms(r, expert, column, [&](double term) {
          expected += term;
          size += std::fabs(term);
        });
        expected += added;
      }
      worst = larger(worst, std::fabs(to_accumulate(results[r * columns + column]) - expected) / size);
    }
  }
  return worst;
}

}  // namespace pymoe::test
