// Allocation of output tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace pymoe::ops {

// Returns a new contiguous tensor on the device of `like`. torch::stable::empty is not used, because it would look up
// aten::empty by its name in every call, and box its arguments. That takes a microsecond, and an operator for a few
// tokens makes up to ten tensors.
inline torch::stable::Tensor contiguous(torch::headeronly::IntHeaderOnlyArrayRef shape,
                                        torch::headeronly::ScalarType dtype, const torch::stable::Tensor& like) {
  namespace conversions = torch::stable::detail;
  std::vector<int64_t> strides(shape.size());
  uint64_t stride = 1;  // may overflow only if a size is 0; there is no element then that would use it
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(std::max<int64_t>(shape[i], 1));
  }
  int32_t device = 0;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                  conversions::to<int32_t>(conversions::from(dtype)), device,
                                                  like.get_device_index(), &made));
  return torch::stable::Tensor(made);
}

// Returns an uninitialised tensor on the device of `like`. For large CPU outputs the system is asked for huge pages:
// the first access to new memory costs a page fault per 4 KiB, which would be most of the time of a memory-bound
// operator. With 2 MiB pages there are 512 times fewer. If the system has none, the advice has no effect.
inline torch::stable::Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef shape, torch::headeronly::ScalarType dtype,
                                   const torch::stable::Tensor& like) {
  torch::stable::Tensor tensor = contiguous(shape, dtype, like);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kHugePage = int64_t{2} << 20;
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (like.is_cpu() && bytes >= 2 * kHugePage) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t end = (begin + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
    if (end > aligned) madvise(reinterpret_cast<void*>(aligned), end - aligned, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

// Returns an uninitialised tensor (rows, columns) with the dtype and device of `like`. It reuses the memory of `used`,
// whose values must no longer be needed, if `used` is large enough and contiguous and has the same dtype and device,
// and the new tensor has at least kWorth bytes: no new pages are then needed. Otherwise, or if `used` is null, the
// tensor gets new memory.
inline torch::stable::Tensor empty_in(const torch::stable::Tensor* used, int64_t rows, int64_t columns,
                                      const torch::stable::Tensor& like) {
  constexpr int64_t kWorth = int64_t{4} << 20;  // bytes from which reuse pays
  const int64_t count = rows * columns;
  if (used == nullptr || used->numel() < count || used->scalar_type() != like.scalar_type() ||
      used->device() != like.device() || !used->is_contiguous() ||
      count * static_cast<int64_t>(like.element_size()) < kWorth) {
    return empty({rows, columns}, like.scalar_type(), like);
  }
  torch::stable::Tensor all = torch::stable::flatten(*used);
  const int64_t shape[] = {rows, columns};
  return torch::stable::view(torch::stable::narrow(all, 0, 0, count), {shape, 2});
}

// Owns the scratch memory of a call: `count` elements. data() is null if `count` is 0.
struct Workspace {
  std::optional<torch::stable::Tensor> values;
  Workspace(int64_t count, torch::headeronly::ScalarType dtype, const torch::stable::Tensor& like) {
    if (count > 0) values = empty({count}, dtype, like);
  }
  void* data() const { return values ? values->mutable_data_ptr() : nullptr; }
};

}  // namespace pymoe::ops
