// Gives torch the device guard that autograd asks for on a device that no build of torch has: one that does nothing.
// And makes tensors that say they lie on a GPU, over memory of the host, for code that asks no more of them than that:
// a build of torch without CUDA has no operator that takes them.
#include <ATen/core/TensorBase.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(MAIA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MAIA>);
}  // namespace

// A new tensor of fp32 over `data`, which must outlive it; the caller owns what is returned.
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
