// pymoe::grouped_linear and its gradients: see kernels/grouped_linear.h for what they compute and
// pymoe/reference/grouped_linear.py for the contract. Inputs may have any strides.
//
// On CUDA torch's grouped GEMM makes the products that it takes without the host (ops/torch_grouped_mm.h), and kernels
// of ours make its offsets safe and add what it leaves out; all other products are made by our own kernel.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "kernels/grouped_linear.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/torch_grouped_mm.h"
#include "ops/twins.h"

namespace pymoe::ops::grouped_linear_op {
namespace {

constexpr const char* kName = "grouped_linear";
constexpr int64_t kMostOffsets = int64_t{1} << 30;  // experts are counted in int32 on the GPU, and rounded up

// `tensor` must be a matrix of `rows` x `columns` elements of the dtype and device of `like`.
MatrixView checked_matrix(const char* argument, const Tensor& tensor, int64_t rows, int64_t columns,
                          const Tensor& like) {
  require(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, kName, argument,
          " must have shape (", rows, ", ", columns, "), got ", tensor);
  require_dtype(kName, argument, tensor, like.scalar_type());
  require_same_device(kName, argument, tensor, like);
  return {tensor.const_data_ptr(), tensor.strides()[0], tensor.strides()[1]};
}

const int32_t* checked_bounds(const Tensor& offsets, const Tensor& like) {
  const int32_t* bounds = checked_offsets(kName, offsets, like);
  require(offsets.size(0) <= kMostOffsets, kName, "offsets must have at most ", kMostOffsets, " entries, got ",
          offsets.size(0));
  return bounds;
}

// The plan of the CUDA twins; the CPU twins need none.
Workspace plan_for(int64_t experts, const Tensor& like) {
  return {on_cuda(like) ? cuda::grouped_linear_workspace(experts) : 0, ScalarType::Int, like};
}

#if PYMOE_WITH_CUDA

int compute_capability(const Tensor& tensor) {
  return cuda::compute_capability(tensor.is_cpu() ? 0 : tensor.get_device_index());
}

// A step around torch's product: it has no twin on the CPU.
template <typename Arguments>
void run_on_cuda(void (*step)(const Arguments&, void*), const Arguments& arguments, const Tensor& tensor) {
  run(Twins<Arguments>{nullptr, step}, arguments, tensor);
}

// Plans, and gives torch's offsets: where the rows of each expert end.
template <typename Arguments>
Tensor plan(const Arguments& a, Tensor workspace) {
  run_on_cuda(&cuda::plan_grouped_linear, {a.offsets, a.workspace, a.rows, a.experts}, workspace);
  return torch::stable::narrow(workspace, 0, 1, a.experts);
}

// torch's product of the two, completed as `a` wants it; `output` is where `a` has the result.
template <typename Arguments>
Tensor by_torch(Arguments a, void* Arguments::*output, const Tensor& left, const Tensor& right, const Tensor& workspace,
                void (*complete)(const Arguments&, void*)) {
  Tensor product = call_torch_grouped_mm(left, right, plan(a, workspace));
  a.*output = product.mutable_data_ptr();
  run_on_cuda(complete, a, product);
  return product;
}

#endif

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias) {
  const DType dtype = floating_dtype(kName, "x", x);
  require(x.dim() == 2, kName, "x must have shape (S, H), got ", x);
  require(weight.dim() == 3, kName, "weight must have shape (E, N, H), got ", weight);
  const int64_t rows = x.size(0), input_features = x.size(1);
  const int64_t experts = weight.size(0), output_features = weight.size(1);
  require(weight.size(2) == input_features, kName, "weight must have shape (E, N, ", input_features, "), got ", weight);
  require_dtype(kName, "weight", weight, x.scalar_type());
  require_same_device(kName, "weight", weight, x);
  const int32_t* bounds = checked_bounds(offsets, x);
  require(offsets.size(0) == experts + 1, kName, "offsets must have E + 1 = ", experts + 1, " entries, got ",
          offsets.size(0));
  const Workspace workspace = plan_for(experts, x);
  GroupedLinearArguments arguments{
      .x = checked_matrix("x", x, rows, input_features, x),
      .weight = {weight.const_data_ptr(), weight.strides()[1], weight.strides()[2]},
      .weight_stride = weight.strides()[0],
      .bias = bias ? checked_matrix("bias", *bias, experts, output_features, x) : MatrixView{},
      .offsets = bounds,
      .y = nullptr,
      .rows = rows,
      .input_features = input_features,
      .output_features = output_features,
      .experts = experts,
      .dtype = dtype,
      .workspace = static_cast<int32_t*>(workspace.data()),
  };
#if PYMOE_WITH_CUDA
  if (on_cuda(x) && torch_takes(arguments, compute_capability(x))) {
    return by_torch(arguments, &GroupedLinearArguments::y, x, torch::stable::transpose(weight, 1, 2), *workspace.values,
                    &cuda::complete_grouped_linear);
  }
#endif
  Tensor y = empty({rows, output_features}, x.scalar_type(), x);
  arguments.y = y.mutable_data_ptr();
  run(PYMOE_TWINS(grouped_linear), arguments, x);
  return y;
}

Tensor weight_grad(const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  const DType dtype = floating_dtype(kName, "grad", grad);
  require(grad.dim() == 2, kName, "grad must have shape (S, N), got ", grad);
  require(x.dim() == 2, kName, "x must have shape (S, H), got ", x);
  const int32_t* bounds = checked_bounds(offsets, grad);
  const int64_t rows = grad.size(0), output_features = grad.size(1), input_features = x.size(1);
  const int64_t experts = offsets.size(0) - 1;
  const Workspace workspace = plan_for(experts, grad);
  GroupedWeightGradArguments arguments{
      .grad = checked_matrix("grad", grad, rows, output_features, grad),
      .x = checked_matrix("x", x, rows, input_features, grad),
      .offsets = bounds,
      .weight_grad = nullptr,
      .rows = rows,
      .input_features = input_features,
      .output_features = output_features,
      .experts = experts,
      .dtype = dtype,
      .workspace = static_cast<int32_t*>(workspace.data()),
  };
#if PYMOE_WITH_CUDA
  if (on_cuda(grad) && torch_takes(arguments, compute_capability(grad))) {
    return by_torch(arguments, &GroupedWeightGradArguments::weight_grad, torch::stable::transpose(grad, 0, 1), x,
                    *workspace.values, &cuda::complete_grouped_weight_grad);
  }
#endif
  Tensor weight_grad = empty({experts, output_features, input_features}, grad.scalar_type(), grad);
  arguments.weight_grad = weight_grad.mutable_data_ptr();
  run(PYMOE_TWINS(grouped_linear_weight_grad), arguments, grad);
  return weight_grad;
}

Tensor bias_grad(const Tensor& grad, const Tensor& offsets) {
  const DType dtype = floating_dtype(kName, "grad", grad);
  require(grad.dim() == 2, kName, "grad must have shape (S, N), got ", grad);
  const int32_t* bounds = checked_bounds(offsets, grad);
  const int64_t experts = offsets.size(0) - 1, output_features = grad.size(1);
  Tensor bias_grad = empty({experts, output_features}, grad.scalar_type(), grad);
  const Workspace workspace = plan_for(experts, grad);
  run(PYMOE_TWINS(grouped_linear_bias_grad),
      GroupedBiasGradArguments{
          .grad = checked_matrix("grad", grad, grad.size(0), output_features, grad),
          .offsets = bounds,
          .bias_grad = bias_grad.mutable_data_ptr(),
          .rows = grad.size(0),
          .output_features = output_features,
          .experts = experts,
          .dtype = dtype,
          .workspace = static_cast<int32_t*>(workspace.data()),
      },
      grad);
  return bias_grad;
}

PYMOE_OPERATOR("grouped_linear", grouped_linear, "(Tensor x, Tensor weight, Tensor offsets, Tensor? bias) -> Tensor")
PYMOE_OPERATOR("grouped_linear_weight_grad", weight_grad, "(Tensor grad, Tensor x, Tensor offsets) -> Tensor")
PYMOE_OPERATOR("grouped_linear_bias_grad", bias_grad, "(Tensor grad, Tensor offsets) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::grouped_linear_op
