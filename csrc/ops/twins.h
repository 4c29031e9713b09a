// One operator, two kernels: the operator's function is written once, and the device of its tensors decides which of
// the two twins runs.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <utility>

#include "ops/check.h"
#include "ops/value_error.h"

// A weak symbol, because a CPU build of torch lacks the function. Such a build has no CUDA tensor that would need it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace pymoe::ops {

// The two twins of a kernel. `cuda` is null in a build without CUDA kernels; `cpu` is null for a step that only CUDA
// tensors need.
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

// Returns true if the CUDA twin serves this tensor. In the tests' library with the emulator, the CUDA twin serves CPU
// tensors.
inline bool on_cuda(const Tensor& tensor) {
#if PYMOE_CUDA_ON_CPU
  return tensor.is_cpu();
#else
  return tensor.is_cuda();
#endif
}

// Selects an argument that differs between the twins: `of_cuda` if `tensor` is on CUDA, else `of_cpu`. A build without
// CUDA always selects `of_cpu`.
#if PYMOE_WITH_CUDA
#define PYMOE_BY_TWIN(tensor, of_cuda, of_cpu) (::pymoe::ops::on_cuda(tensor) ? (of_cuda) : (of_cpu))
#else
#define PYMOE_BY_TWIN(tensor, of_cuda, of_cpu) (of_cpu)
#endif

// Returns the current stream of the calling thread, on the tensor's device. Do not store the stream: CUDA graphs and
// stream contexts change which one is current.
inline void* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("pymoe: this build of torch has no CUDA stream to launch on");
  }
  return stream;
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

// Translated<kFunction>::call calls kFunction, and turns std::invalid_argument into Python's ValueError.
template <auto kFunction, typename Signature = decltype(kFunction)>
struct Translated;
template <auto kFunction, typename Result, typename... Parameters>
struct Translated<kFunction, Result (*)(Parameters...)> {
  static Result call(Parameters... arguments) {
    try {
      return kFunction(std::forward<Parameters>(arguments)...);
    } catch (const std::invalid_argument& error) {
      throw pybind11::value_error(error.what());
    }
  }
};

// Declares torch.ops.pymoe.NAME(signature); `function` serves it on every device for which the build has kernels.
#define PYMOE_OPERATOR(name, function, signature)      \
  PYMOE_OPERATOR_OF_THE_CPU(name, function, signature) \
  PYMOE_IMPLEMENT_ON_CUDA(name, function)
// Like PYMOE_OPERATOR, for an operator without a CUDA kernel: CUDA tensors are refused (pymoe/ops/missing_cuda.py).
#define PYMOE_OPERATOR_OF_THE_CPU(name, function, signature)                     \
  STABLE_TORCH_LIBRARY_FRAGMENT(pymoe, library) { library.def(name signature); } \
  STABLE_TORCH_LIBRARY_IMPL(pymoe, CPU, library) {                               \
    library.impl(name, TORCH_BOX(&::pymoe::ops::Translated<&function>::call));   \
  }
#if PYMOE_WITH_CUDA && !PYMOE_CUDA_ON_CPU
#define PYMOE_IMPLEMENT_ON_CUDA(name, function)                                \
  STABLE_TORCH_LIBRARY_IMPL(pymoe, CUDA, library) {                            \
    library.impl(name, TORCH_BOX(&::pymoe::ops::Translated<&function>::call)); \
  }
#else
#define PYMOE_IMPLEMENT_ON_CUDA(name, function)
#endif

}  // namespace pymoe::ops
