// The current CUDA stream of the calling thread, without a torch CUDA header.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

// Weak: absent from a CPU build of torch, where no CUDA tensor can exist to ask for it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace pymoe::ops {

// Asked for at every call, never kept: the current stream changes under CUDA graphs and stream contexts.
inline void* current_stream(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("pymoe: this build of torch has no CUDA stream to launch on");
  }
  return stream;
}

}  // namespace pymoe::ops
