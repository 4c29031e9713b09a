// Registers a device guard without effect for the pretended device, since autograd requires one. Also makes tensors
// that report a GPU but lie in host memory, for code that only looks at the device: without CUDA, torch has no operator
// that accepts them.
#include <ATen/core/TensorBase.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(MAIA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MAIA>);
}  // namespace

// Returns a new float32 tensor over `data`, which must outlive it; the caller owns the tensor.
extern "C" at::TensorBase* pretended_cuda_tensor(void* data, int64_t dimensions, const int64_t* sizes, int index) {
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  int64_t bytes = sizeof(float);
  for (int64_t i = 0; i < dimensions; ++i) bytes *= sizes[i];
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, device), nullptr, false);
  auto tensor = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                     caffe2::TypeMeta::Make<float>());
  tensor->set_sizes_contiguous({sizes, static_cast<size_t>(dimensions)});
  return new at::TensorBase(std::move(tensor));
}
