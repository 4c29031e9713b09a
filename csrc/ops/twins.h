// One operator, two kernels: the operator's function is written once, and the device of its tensors decides which of
// the kernel's twins runs.
#pragma once

#include "ops/check.h"
#include "ops/stream.h"

namespace pymoe::ops {

// The two twins of a kernel. `cuda` is null in a build without CUDA kernels.
template <typename Arguments>
struct Twins {
  void (*cpu)(const Arguments&);
  void (*cuda)(const Arguments&, void* stream);
};

#if PYMOE_WITH_CUDA
#define PYMOE_TWINS(kernel) \
  ::pymoe::ops::Twins { &::pymoe::cpu::kernel, &::pymoe::cuda::kernel }
#else
template <typename Arguments>
Twins<Arguments> cpu_alone(void (*cpu)(const Arguments&)) {
  return {cpu, nullptr};
}
#define PYMOE_TWINS(kernel) ::pymoe::ops::cpu_alone(&::pymoe::cpu::kernel)
#endif

// Does the CUDA twin serve this tensor? In the library that the tests build with the emulator it serves CPU tensors.
inline bool on_cuda(const Tensor& tensor) {
#if PYMOE_CUDA_ON_CPU
  return tensor.is_cpu();
#else
  return tensor.is_cuda();
#endif
}

// Runs the twin that serves `tensor`, on its device's current stream.
template <typename Arguments>
void run(Twins<Arguments> twins, const Arguments& arguments, const Tensor& tensor) {
  if (!on_cuda(tensor)) return twins.cpu(arguments);
#if PYMOE_CUDA_ON_CPU
  twins.cuda(arguments, nullptr);
#elif PYMOE_WITH_CUDA
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  twins.cuda(arguments, current_stream(tensor));
#endif
}

// Registers implement(library), a function template, for every device that the build has kernels for.
#if PYMOE_WITH_CUDA && !PYMOE_CUDA_ON_CPU
#define PYMOE_IMPLEMENT_ON_EVERY_DEVICE(implement)                       \
  STABLE_TORCH_LIBRARY_IMPL(pymoe, CPU, library) { implement(library); } \
  STABLE_TORCH_LIBRARY_IMPL(pymoe, CUDA, library) { implement(library); }
#else
#define PYMOE_IMPLEMENT_ON_EVERY_DEVICE(implement) \
  STABLE_TORCH_LIBRARY_IMPL(pymoe, CPU, library) { implement(library); }
#endif

}  // namespace pymoe::ops
