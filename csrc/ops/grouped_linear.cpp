// pymoe::grouped_linear and its gradients: see kernels/grouped_linear.h for what they compute and
// pymoe/reference/grouped_linear.py for the contract. x, weights, biases and gradients may have any strides.
//
// On CUDA torch's grouped GEMM makes the products that it can make without the host (ops/torch_grouped_mm.h); kernels
// of this project make its offsets safe and add what it leaves out. This project's own kernel makes all other products,
// including those of rows in a given order.
//
// `whole` is a promise of the caller: the offsets come from build_routing without a capacity, for choices that all name
// an expert. So the offsets need not be made safe, and no row is left out. A layer makes this promise only for its own
// offsets, and saves two launches per product. On the GPU the promise is not checked, because the host would have to
// wait for the offsets.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>

#include "kernels/grouped_linear.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/torch_grouped_mm.h"
#include "ops/twins.h"

namespace pymoe::ops::grouped_linear_op {
namespace {

constexpr const char* kName = "grouped_linear";
constexpr int64_t kMostOffsets = int64_t{1} << 30;  // the kernels round the number of experts up, in int32

// Returns a view of `tensor`, which must be a matrix of `rows` x `columns` elements of the dtype and device of `like`.
// `argument` is the tensor's name in errors.
MatrixView checked_matrix(const char* argument, const Tensor& tensor, int64_t rows, int64_t columns,
                          const Tensor& like) {
  require(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, kName, argument,
          " must have shape (", rows, ", ", columns, "), got ", tensor);
  require_dtype(kName, argument, tensor, like.scalar_type());
  require_same_device(kName, argument, tensor, like);
  if (tensor.is_contiguous()) return {tensor.const_data_ptr(), columns, 1};  // one column or row may have any stride
  return {tensor.const_data_ptr(), tensor.strides()[0], tensor.strides()[1]};
}

// Checks the offsets and returns their number of experts.
int64_t checked_experts(const Tensor& offsets, const Tensor& like) {
  checked_offsets(kName, offsets, like);
  require(offsets.size(0) <= kMostOffsets, kName, "offsets must have at most ", kMostOffsets, " entries, got ",
          offsets.size(0));
  return offsets.size(0) - 1;
}

// Returns the workspace for the plan of the CUDA twins; the CPU twins need none.
Workspace plan_for(int64_t experts, const Tensor& like) {
  return {on_cuda(like) ? cuda::grouped_linear_workspace(experts) : 0, ScalarType::Int, like};
}

#if PYMOE_WITH_CUDA

int compute_capability(const Tensor& tensor) {
  return cuda::compute_capability(tensor.is_cpu() ? 0 : tensor.get_device_index());
}

// Runs a step before or after torch's product. Such a step has no CPU twin.
template <typename Arguments>
void run_on_cuda(void (*step)(const Arguments&, void*), const Arguments& arguments, const Tensor& tensor) {
  run(Twins<Arguments>{nullptr, step}, arguments, tensor);
}

// Returns the end of each expert's rows, in the form that torch takes.
Tensor ends(Tensor offsets, int64_t experts) { return torch::stable::narrow(offsets, 0, 1, experts); }

// Returns torch's grouped product of `left` and `right`. torch may leave rows without an expert, and gradients of
// experts without rows, unwritten; `complete` writes zeros to them.
template <typename Arguments>
Tensor by_torch(Arguments a, const Tensor& left, const Tensor& right, const Tensor& like,
                void (*complete)(const Arguments&, void*)) {
  const Workspace workspace = plan_for(a.experts, like);
  a.workspace = static_cast<int32_t*>(workspace.data());
  run_on_cuda<GroupedArguments>(&cuda::plan_grouped_linear, a, like);
  Tensor product = call_torch_grouped_mm(left, right, ends(*workspace.values, a.experts));
  a.out = product.mutable_data_ptr();
  run_on_cuda(complete, a, product);
  return product;
}

#endif

// Returns the common part of all arguments; `out` and the workspace are added later.
GroupedArguments grouped(const Tensor& offsets, const std::optional<Tensor>& order, int64_t rows,
                         int64_t input_features, int64_t output_features, DType dtype) {
  return {static_cast<const int32_t*>(offsets.const_data_ptr()),
          nullptr,
          rows,
          input_features,
          output_features,
          offsets.size(0) - 1,
          dtype,
          nullptr,
          order ? static_cast<const int32_t*>(order->const_data_ptr()) : nullptr};
}

// If there is an order, checks it against `rows`. Returns `rows` as kernels need them: contiguous if there is an order.
Tensor placed(const Tensor& rows, const std::optional<Tensor>& order) {
  if (!order) return rows;
  require_tensor(kName, "order", *order, ScalarType::Int, {rows.size(0)}, rows);
  return torch::stable::contiguous(rows);
}

}  // namespace

Tensor grouped_linear(const Tensor& any_x, const Tensor& weight, const Tensor& offsets,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& order, const Tensor* used,
                      bool whole) {
  const DType dtype = floating_dtype(kName, "x", any_x);
  require(any_x.dim() == 2, kName, "x must have shape (S, H), got ", any_x);
  const Tensor x = placed(any_x, order);
  require(weight.dim() == 3, kName, "weight must have shape (E, N, H), got ", weight);
  const int64_t rows = x.size(0), input_features = x.size(1);
  const int64_t experts = weight.size(0), output_features = weight.size(1);
  require(weight.size(2) == input_features, kName, "weight must have shape (E, N, ", input_features, "), got ", weight);
  require_dtype(kName, "weight", weight, x.scalar_type());
  require_same_device(kName, "weight", weight, x);
  require(checked_experts(offsets, x) == experts, kName, "offsets must have E + 1 = ", experts + 1, " entries, got ",
          offsets.size(0));
  GroupedLinearArguments arguments{
      grouped(offsets, order, rows, input_features, output_features, dtype),
      checked_matrix("x", x, rows, input_features, x),
      {weight.const_data_ptr(), weight.strides()[1], weight.strides()[2]},
      weight.strides()[0],
      bias ? checked_matrix("bias", *bias, experts, output_features, x) : MatrixView{},
  };
#if PYMOE_WITH_CUDA
  if (on_cuda(x) && torch_takes(arguments, compute_capability(x))) {
    const Tensor columns = torch::stable::transpose(weight, 1, 2);
    if (whole) return call_torch_grouped_mm(x, columns, ends(offsets, experts));
    return by_torch(arguments, x, columns, x, &cuda::complete_grouped_linear);
  }
#endif
  Tensor y = empty_in(used, rows, output_features, x);
  const Workspace workspace = plan_for(experts, x);
  arguments.out = y.mutable_data_ptr();
  arguments.workspace = static_cast<int32_t*>(workspace.data());
  run(PYMOE_TWINS(grouped_linear), arguments, x);
  return y;
}

bool torch_multiplies([[maybe_unused]] int64_t device) {
#if PYMOE_WITH_CUDA
  if (!torch_grouped_mm::wanted()) return false;
  try {
    return torch_grouped_mm::takes_bfloat16(cuda::compute_capability(static_cast<int>(device)));
  } catch (const std::runtime_error&) {  // there is no such device: tensors without values are traced
    return false;
  }
#else
  return false;
#endif
}

namespace {

Tensor weight_grad(const Tensor& any_grad, const Tensor& any_x, const Tensor& offsets,
                   const std::optional<Tensor>& order, bool whole) {
  const DType dtype = floating_dtype(kName, "grad", any_grad);
  require(any_grad.dim() == 2, kName, "grad must have shape (S, N), got ", any_grad);
  require(any_x.dim() == 2, kName, "x must have shape (S, H), got ", any_x);
  const Tensor grad = placed(any_grad, order), x = placed(any_x, order);
  const int64_t rows = grad.size(0), output_features = grad.size(1), input_features = x.size(1);
  const int64_t experts = checked_experts(offsets, grad);
  GroupedWeightGradArguments arguments{
      grouped(offsets, order, rows, input_features, output_features, dtype),
      checked_matrix("grad", grad, rows, output_features, grad),
      checked_matrix("x", x, rows, input_features, grad),
  };
#if PYMOE_WITH_CUDA
  const int capability = on_cuda(grad) ? compute_capability(grad) : 0;
  if (on_cuda(grad) && torch_takes(arguments, capability)) {
    const Tensor columns = torch::stable::transpose(grad, 0, 1);
    if (whole && torch_clears_idle_experts(capability)) {
      return call_torch_grouped_mm(columns, x, ends(offsets, experts));
    }
    return by_torch(arguments, columns, x, grad, &cuda::complete_grouped_weight_grad);
  }
#endif
  const Workspace workspace = plan_for(experts, grad);
  arguments.workspace = static_cast<int32_t*>(workspace.data());
  Tensor weight_grad = empty({experts, output_features, input_features}, grad.scalar_type(), grad);
  arguments.out = weight_grad.mutable_data_ptr();
  run(PYMOE_TWINS(grouped_linear_weight_grad), arguments, grad);
  return weight_grad;
}

Tensor bias_grad(const Tensor& any_grad, const Tensor& offsets, const std::optional<Tensor>& order) {
  const DType dtype = floating_dtype(kName, "grad", any_grad);
  require(any_grad.dim() == 2, kName, "grad must have shape (S, N), got ", any_grad);
  const Tensor grad = placed(any_grad, order);
  const int64_t rows = grad.size(0), output_features = grad.size(1), experts = checked_experts(offsets, grad);
  Tensor bias_grad = empty({experts, output_features}, grad.scalar_type(), grad);
  const Workspace workspace = plan_for(experts, grad);
  GroupedBiasGradArguments arguments{
      grouped(offsets, order, rows, 0, output_features, dtype),
      checked_matrix("grad", grad, rows, output_features, grad),
  };
  arguments.workspace = static_cast<int32_t*>(workspace.data());
  arguments.out = bias_grad.mutable_data_ptr();
  run(PYMOE_TWINS(grouped_linear_bias_grad), arguments, grad);
  return bias_grad;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& order, bool whole) {
  return grouped_linear(x, weight, offsets, bias, order, nullptr, whole);
}

PYMOE_OPERATOR(
    "grouped_linear", linear,
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, Tensor? order=None, bool whole=False) -> Tensor")
PYMOE_OPERATOR("grouped_linear_weight_grad", weight_grad,
               "(Tensor grad, Tensor x, Tensor offsets, Tensor? order=None, bool whole=False) -> Tensor")
PYMOE_OPERATOR("grouped_linear_bias_grad", bias_grad, "(Tensor grad, Tensor offsets, Tensor? order=None) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::grouped_linear_op
