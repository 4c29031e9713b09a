// pymoe::gather_batch: see kernels/gather_batch.h for what it computes and pymoe/reference/gather_batch.py for its
// contract.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "kernels/gather_batch.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/twins.h"

namespace pymoe::ops::gather_batch_op {
namespace {

constexpr const char* kName = "gather_batch";

Tensor gather_batch(const std::vector<Tensor>& tensors) {
  require(!tensors.empty(), kName, "tensors must hold at least one tensor, got none");
  const Tensor& first = tensors[0];
  require(first.dim() >= 1, kName, "tensors[0] must have at least one dimension, got ()");
  std::vector<int64_t> shape(first.sizes().begin(), first.sizes().end());
  shape[0] = 0;
  std::vector<const void*> sources;
  std::vector<int64_t> starts{0};
  sources.reserve(tensors.size());
  starts.reserve(tensors.size() + 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    bool same =
        tensor.dim() == first.dim() && tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device();
    for (int64_t dim = 1; same && dim < first.dim(); ++dim) same = tensor.size(dim) == first.size(dim);
    require(same, kName, "tensors[", i, "] must agree with tensors[0] in dtype, device and trailing shape, got ",
            tensor, " and ", first);
    require(tensor.is_contiguous(), kName, "tensors[", i, "] must be contiguous");
    shape[0] += tensor.size(0);
    sources.push_back(tensor.const_data_ptr());
    starts.push_back(starts.back() + tensor.numel() * static_cast<int64_t>(tensor.element_size()));
  }
  Tensor batch = empty(shape, first.scalar_type(), first);
  const GatherBatchArguments arguments{sources.data(), starts.data(), batch.mutable_data_ptr(),
                                       static_cast<int64_t>(tensors.size())};
  run(PYMOE_TWINS(gather_batch), arguments, first);
  return batch;
}

PYMOE_OPERATOR("gather_batch", gather_batch, "(Tensor[] tensors) -> Tensor")

}  // namespace
}  // namespace pymoe::ops::gather_batch_op
