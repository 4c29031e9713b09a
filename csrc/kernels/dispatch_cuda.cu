// Source-major gather on the GPU. A group of threads owns a token: every thread holds one vector of the token's row
// at a time and writes it to the K rows that the token's choices own, so a row is read once whatever K is. Vectors
// are as wide as alignment allows, 16 bytes in all usual shapes. Blocks past the tokens clear the unused rows.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/dispatch.h"

namespace pymoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kClearBlocks = 32;

template <typename Vector>
__global__ void __launch_bounds__(kThreads) dispatch_kernel(const Vector* __restrict__ x,
                                                            const int32_t* __restrict__ slot,
                                                            const int32_t* __restrict__ used,
                                                            Vector* __restrict__ out, int64_t tokens, int64_t choices,
                                                            int64_t row_vectors, int group, int64_t token_blocks) {
  const int64_t rows = tokens * choices;
  if (blockIdx.x < token_blocks) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / group) + threadIdx.x / group;
    if (token >= tokens) return;
    const Vector* row = x + token * row_vectors;
    for (int64_t column = threadIdx.x % group; column < row_vectors; column += group) {
      const Vector value = row[column];
      for (int64_t choice = 0; choice < choices; ++choice) {
        const int64_t target = slot[token * choices + choice];
        if (target >= 0 && target < rows) out[target * row_vectors + column] = value;
      }
    }
    return;
  }
  const int64_t in_use = *used < 0 ? 0 : *used;
  const int64_t vectors = (rows - in_use) * row_vectors;
  const int64_t stride = static_cast<int64_t>(kClearBlocks) * kThreads;
  for (int64_t i = (blockIdx.x - token_blocks) * kThreads + threadIdx.x; i < vectors; i += stride) {
    out[in_use * row_vectors + i] = Vector{};
  }
}

template <typename Vector>
void launch(const DispatchArguments& a, cudaStream_t stream) {
  const int64_t row_vectors = a.row_bytes / static_cast<int64_t>(sizeof(Vector));
  int group = 32;  // threads a token: enough to cover its row once, whole warps, at most the block
  while (group < kThreads && group < row_vectors) group *= 2;
  const int64_t tokens_per_block = kThreads / group;
  const int64_t token_blocks = (a.tokens + tokens_per_block - 1) / tokens_per_block;
  dispatch_kernel<Vector><<<static_cast<unsigned>(token_blocks + kClearBlocks), kThreads, 0, stream>>>(
      static_cast<const Vector*>(a.x), a.slot, a.used, static_cast<Vector*>(a.out), a.tokens, a.choices, row_vectors,
      group, token_blocks);
}

}  // namespace

void dispatch(const DispatchArguments& a, void* opaque_stream) {
  if (a.tokens == 0 || a.choices == 0 || a.row_bytes == 0) return;
  auto* stream = static_cast<cudaStream_t>(opaque_stream);
  const auto misaligned = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.out) |
                          static_cast<uintptr_t>(a.row_bytes);
  if (misaligned % 16 == 0) {
    launch<uint4>(a, stream);
  } else if (misaligned % 8 == 0) {
    launch<uint2>(a, stream);
  } else if (misaligned % 4 == 0) {
    launch<uint32_t>(a, stream);
  } else {
    launch<uint16_t>(a, stream);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("dispatch: ") + cudaGetErrorString(error));
}

}  // namespace pymoe::cuda
