// torch's grouped GEMM, aten::_grouped_mm: the arguments that it accepts on CUDA, and the call.
//
// Its fast kernel is for bf16 on compute capability 9.x and 10.x. That kernel needs 16-byte alignment of all rows and
// of every expert's part and at most 1023 experts, and runs on the stream without the host. For all other arguments,
// torch runs a loop over experts that copies the offsets to the host, which no CUDA graph can contain; so these
// arguments are refused here.
//
// The fast kernel trusts its offsets, leaves rows past the last offset unwritten, takes only sorted rows, and rounds
// before a bias could be added; so unsorted rows and biases are refused, too. (A layer therefore leaves the biases of
// such products to the operators after them: pymoe/nn/apply_experts.py.) Only compute capabilities 9.0 and 10.0 are
// accepted: 10.3 is refused until this product has been measured there, because gradients of NaN have been reported on
// it and not explained (pytorch/pytorch#193633). With PYMOE_TORCH_GROUPED_MM=0 this project's own kernel makes all
// products.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "kernels/grouped_linear.h"
#include "ops/check.h"

namespace pymoe::ops {

namespace torch_grouped_mm {

inline constexpr int64_t kAlignment = 16, kElements = kAlignment / 2;

inline bool aligned(std::initializer_list<int64_t> elements) {
  for (const int64_t count : elements) {
    if (count % kElements != 0) return false;
  }
  return true;
}

// Returns true unless the environment variable PYMOE_TORCH_GROUPED_MM is 0; throws if the variable is set to anything
// except 0, 1 or an empty string. It is read only once, so that the choice of kernel does not change while the process
// runs.
inline bool wanted() {
  static const bool answer = [] {
    const char* text = std::getenv("PYMOE_TORCH_GROUPED_MM");
    const std::string_view value = text != nullptr ? text : "";
    require(value.empty() || value == "0" || value == "1", "grouped_linear",
            "PYMOE_TORCH_GROUPED_MM must be 0 or 1, got '", value, "'");
    return value != "0";
  }();
  return answer;
}

// Returns true if the matrix is aligned, its rows do not overlap and the elements of a row are contiguous; with
// `either`, also if this holds with columns in place of rows.
inline bool takes_matrix(const MatrixView& m, int64_t rows, int64_t columns, bool either = false) {
  const bool by_rows = m.column_stride == 1 && m.row_stride >= columns && aligned({m.row_stride});
  const bool by_columns = m.row_stride == 1 && m.column_stride >= rows && aligned({m.column_stride});
  return (by_rows || (either && by_columns)) && reinterpret_cast<uintptr_t>(m.data) % kAlignment == 0;
}

inline bool takes_bfloat16(int capability) { return wanted() && (capability == 90 || capability == 100); }

inline bool takes_sizes(DType dtype, int capability, int64_t experts, int64_t rows, int64_t input, int64_t output) {
  return dtype == DType::kBFloat16 && takes_bfloat16(capability) && experts >= 1 && experts <= 1023 && rows >= 1 &&
         rows <= std::numeric_limits<int32_t>::max() && input >= 1 && output >= 1 && aligned({input, output});
}

}  // namespace torch_grouped_mm

inline bool torch_takes(const GroupedLinearArguments& a, int capability) {
  using namespace torch_grouped_mm;
  return a.order == nullptr &&
         takes_sizes(a.dtype, capability, a.experts, a.rows, a.input_features, a.output_features) &&
         a.bias.data == nullptr && takes_matrix(a.x, a.rows, a.input_features) &&
         takes_matrix(a.weight, a.output_features, a.input_features, true) && aligned({a.weight_stride});
}

inline bool torch_takes(const GroupedWeightGradArguments& a, int capability) {
  using namespace torch_grouped_mm;
  return a.order == nullptr &&
         takes_sizes(a.dtype, capability, a.experts, a.rows, a.input_features, a.output_features) &&
         takes_matrix(a.grad, a.rows, a.output_features) && takes_matrix(a.x, a.rows, a.input_features);
}

// Returns true if the product below is known to write zeros into the gradient of an expert without rows. On compute
// capability 9.0, torch's kernels clear every sum before they check for rows, as the machine code of torch 2.11, 2.12
// and 2.13 shows; other versions were not examined. On 10.0 they may leave anything there (pytorch/pytorch#172439). The
// version is that of the torch in use, because one wheel serves all versions.
inline bool torch_clears_idle_experts(int capability) {
  const uint64_t version = aoti_torch_abi_version() >> 48;  // major and minor, a byte each
  return capability == 90 && version >= 0x020b && version <= 0x020d;
}

// Computes either (S, H) x (E, H, N) -> (S, N), where the first matrix multiplies the rows up to ends[0], and so on; or
// (N, S) x (S, H) -> (E, N, H), where each sum runs over the rows of one expert. Like every other product here, it is
// invisible to autograd.
inline Tensor call_torch_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& ends) {
  struct WithoutGrad {
    bool before = aoti_torch_grad_mode_is_enabled();
    WithoutGrad() { aoti_torch_grad_mode_set_enabled(false); }
    ~WithoutGrad() { aoti_torch_grad_mode_set_enabled(before); }
  } without_grad;
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack{from(a), from(b), from(std::optional<Tensor>(ends)), from(std::nullopt),
                                    from(std::nullopt)};  // bias, out_dtype
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_grouped_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace pymoe::ops
