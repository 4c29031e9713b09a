#include "kernels/combine.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cpu/checked_index.h"
#include "kernels/cpu/checked_offsets.h"
#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

// Returns the minimum number of tokens in a range for one thread: at least one; their rows take about 64 KiB.
int64_t grain(int64_t choices, int64_t row_bytes) {
  return std::max<int64_t>(1, (int64_t{64} << 10) / ((1 + choices) * std::max<int64_t>(row_bytes, 1)));
}

void check_biases(const char* operator_name, const CombineInput& a) {
  if (a.biases.data == nullptr) return;
  check_offsets(operator_name, a.biases.offsets, a.biases.experts, a.rows, "routing.offsets");
}

}  // namespace
}  // namespace pymoe::cpu

#define PYMOE_ISA_BODY "kernels/combine_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {

// Stores go through the caches. Stores that bypass them, as in dispatch, were no faster: the memory of a new tensor is
// in the caches, since the system has just cleared it.
void combine(const CombineArguments& a) {
  check_biases("combine", a);
  if (a.tokens == 0) return;
  const int64_t row_bytes = a.hidden * size_of(a.dtype);
  const auto run = PYMOE_SELECT_ISA(combine_range);
  parallel_for(0, a.tokens, grain(a.choices, row_bytes), [&](int64_t begin, int64_t end) {
    std::vector<std::byte> scratch(static_cast<size_t>(2 * a.choices) * (2 * sizeof(void*) + sizeof(double)));
    run(a, begin, end, scratch.data());
  });
}

void combine_backward(const CombineBackwardArguments& a) {
  check_biases("combine_backward", a);
  if (a.dy == nullptr && a.dweights == nullptr) return;
  const int64_t row_bytes = a.hidden * size_of(a.dtype);
  const auto run = PYMOE_SELECT_ISA(combine_backward_range);
  parallel_for(0, a.tokens, grain(2 * a.choices, row_bytes), [&](int64_t begin, int64_t end) { run(a, begin, end); });
  if (a.dy == nullptr || row_bytes == 0) return;
  const int64_t used = std::clamp<int64_t>(*a.used, 0, a.rows);
  parallel_for(used, a.rows, grain(0, row_bytes), [&](int64_t begin, int64_t end) {
    memset(static_cast<char*>(a.dy) + begin * row_bytes, 0, static_cast<size_t>((end - begin) * row_bytes));
  });
}

}  // namespace pymoe::cpu
