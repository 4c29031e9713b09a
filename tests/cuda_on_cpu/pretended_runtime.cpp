// See pretended_runtime.h.
#include "pretended_runtime.h"

#include <cuda_runtime.h>

namespace {

size_t most_shared = 48 << 10;
cudaError_t remembered = cudaSuccess;

cudaError_t remember(cudaError_t error) { return error == cudaSuccess ? error : remembered = error; }

cudaError_t start(size_t shared_bytes) {
  if (shared_bytes > most_shared) return remember(cudaErrorInvalidValue);
  ++pretended::launched;
  return cudaSuccess;
}

struct {
  dim3 grid, block;
  size_t shared;
} pushed;

}  // namespace

extern "C" {
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  if (pretended::refuse_attribute) return remember(cudaErrorInvalidValue);
  most_shared = static_cast<size_t>(value);
  if (auto* const once = pretended::other_thread) {
    pretended::other_thread = nullptr;
    once();
  }
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = remembered;
  remembered = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return "refused"; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return remember(cudaErrorInvalidValue); }

// Functions to which the compiler translates <<<...>>>, in this toolkit and in older ones.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st*) {
  pushed = {grid, block, shared};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void*) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t shared, cudaStream_t) { return start(shared); }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t shared, cudaStream_t) { return start(shared); }
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
char __cudaInitModule(void**) { return 0; }
}
