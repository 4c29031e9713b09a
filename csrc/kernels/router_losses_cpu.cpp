#include "kernels/router_losses.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

// Returns the logsumexp of a row: max + log(sum), with `sum` the sum of e^(l - max). If the maximum is infinite, the
// terms of the sum are NaN, so the maximum is returned, or NaN if the row contains a NaN.
template <typename S>
S logsumexp_of(S max, S sum, const S* row, int64_t size) {
  if (!std::isinf(max)) return max + std::log(sum);
  for (int64_t i = 0; i < size; ++i) {
    if (row[i] != row[i]) return row[i];
  }
  return max;
}

}  // namespace
}  // namespace pymoe::cpu

#define PYMOE_ISA_BODY "kernels/router_losses_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {
namespace {

// The share of each expert, load / sum of load, in the accumulated dtype. It is followed by kSumLanes zeros, for the
// last vector of a row.
class Fraction {
 public:
  explicit Fraction(const RouterLossesInput& a) {
    if (a.load == nullptr) return;
    values_.reset(new double[static_cast<size_t>(a.num_experts + kSumLanes)]());
    const auto load_of = [&](int64_t e) {
      return a.load_is_int64 ? static_cast<const int64_t*>(a.load)[e] : int64_t{static_cast<const int32_t*>(a.load)[e]};
    };
    uint64_t sum = 0;  // unsigned, because a load comes from the caller and may have any values
    for (int64_t e = 0; e < a.num_experts; ++e) sum += static_cast<uint64_t>(load_of(e));
    const int64_t total = std::max<int64_t>(static_cast<int64_t>(sum), 1);
    for (int64_t e = 0; e < a.num_experts; ++e) {
      if (a.dtype == DType::kFloat64) {
        values_[e] = static_cast<double>(load_of(e)) / static_cast<double>(total);
      } else {
        reinterpret_cast<float*>(values_.get())[e] = static_cast<float>(load_of(e)) / static_cast<float>(total);
      }
    }
  }

  const void* values() const { return values_.get(); }

 private:
  std::unique_ptr<double[]> values_;
};

// Returns the sum of `blocks` values, kept in kSumLanes partial sums, which are added as a balanced tree.
double sum_of_blocks(const double* sums, int64_t blocks) {
  double lanes[kSumLanes] = {};
  for (int64_t block = 0; block < blocks; ++block) lanes[block % kSumLanes] += sums[block];
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

void write_scalar(DType dtype, void* target, double value) {
  if (dtype == DType::kFloat64) {
    *static_cast<double*>(target) = value;
  } else {
    *static_cast<float*>(target) = static_cast<float>(value);
  }
}

}  // namespace

void router_losses(const RouterLossesArguments& a) {
  if (a.tokens == 0) {
    write_scalar(a.dtype, a.balance, 0);
    write_scalar(a.dtype, a.z, 0);
    return;
  }
  const Fraction fraction(a);
  const int64_t blocks = (a.tokens + kLossBlock - 1) / kLossBlock;
  double* const balance = a.workspace;
  double* const z = balance + blocks;
  const auto router_losses_block = PYMOE_SELECT_ISA(router_losses_block);
  const int64_t grain = std::max<int64_t>(1, (int64_t{8} << 10) / (kLossBlock * a.num_experts));
  parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[static_cast<size_t>(a.num_experts)]);
    for (int64_t block = begin; block < end; ++block) {
      router_losses_block(a, fraction.values(), block * kLossBlock, std::min((block + 1) * kLossBlock, a.tokens),
                          scratch.get(), &balance[block], &z[block]);
    }
  });
  const double tokens = static_cast<double>(a.tokens);
  write_scalar(a.dtype, a.balance, sum_of_blocks(balance, blocks) / tokens * static_cast<double>(a.num_experts));
  write_scalar(a.dtype, a.z, sum_of_blocks(z, blocks) / tokens);
}

void router_losses_backward(const RouterLossesBackwardArguments& a) {
  if (a.tokens == 0) return;
  const Fraction fraction(a);
  const auto router_losses_backward_range = PYMOE_SELECT_ISA(router_losses_backward_range);
  const int64_t grain = std::max<int64_t>(1, (int64_t{8} << 10) / a.num_experts);
  parallel_for(0, a.tokens, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[static_cast<size_t>(3 * (a.num_experts + kSumLanes))]);
    router_losses_backward_range(a, fraction.values(), begin, end, scratch.get());
  });
}

}  // namespace pymoe::cpu
