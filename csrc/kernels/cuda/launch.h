// Starts a kernel on a stream: the only place where pymoe launches kernels.
#pragma once

#include <cstdint>

#include "kernels/cuda/platform.h"

namespace pymoe::cuda {

// Throws std::runtime_error("OPERATOR: WHY"). Not inline: nvcc reads a file four times, and <string> and <stdexcept>
// alone would take half of the time in which it compiles a small kernel file.
[[noreturn]] void refuse_launch(const char* operator_name, const char* why);

struct LaunchShape {
  int64_t blocks;            // number of blocks, in one dimension, at most kMostBlocks; 0: nothing is launched
  int threads;               // per block, at most 1024
  int64_t shared_bytes = 0;  // dynamic shared memory per block, at most kMostSharedBytes
};

inline constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
// The shared memory per block that every GPU from compute capability 8.0 on allows; 8.6 and 8.9 allow no more.
inline constexpr int64_t kMostSharedBytes = 99 << 10;
// The shared memory that every kernel may use. A kernel that needs more must have no static shared memory, which counts
// against the same limit.
inline constexpr int64_t kUsualSharedBytes = 48 << 10;

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

PYMOE_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if defined(__CUDACC__)
inline void check(const char* operator_name, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next launch would otherwise report as its own
  refuse_launch(operator_name, cudaGetErrorString(error));
}
#endif

// Enqueues kernel(arguments...) on `stream` (a cudaStream_t) and returns immediately. Throws std::runtime_error, which
// names the operator, if the launch is refused.
template <typename... Parameters, typename... Arguments>
void launch(const char* operator_name, void (*kernel)(Parameters...), const LaunchShape& shape, void* stream,
            const Arguments&... arguments) {
  if (shape.blocks == 0) return;
  if (shape.blocks < 0 || shape.blocks > kMostBlocks) {
    refuse_launch(operator_name, "too large for one launch");
  }
#if defined(__CUDACC__)
  if (shape.shared_bytes > kUsualSharedBytes) {
    // Always set the largest limit. The limit is a property of the kernel and is shared by all threads: a launch that
    // set only what it needs could lower the limit below what another thread's launch needs.
    check(operator_name,
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kMostSharedBytes)));
  }
  kernel<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
           static_cast<size_t>(shape.shared_bytes), static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  check(operator_name, cudaGetLastError());
#else
  static_cast<void>(stream);
  emulator::launch(operator_name, shape.blocks, shape.threads, shape.shared_bytes,
                   [&] { kernel(static_cast<Parameters>(arguments)...); });
#endif
}

// Enqueues a memset of `bytes` bytes to zero, for kernels that count there.
inline void clear(const char* operator_name, void* pointer, int64_t bytes, void* stream) {
  if (bytes == 0) return;
#if defined(__CUDACC__)
  check(operator_name, cudaMemsetAsync(pointer, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
#else
  static_cast<void>(stream);
  emulator::clear(operator_name, pointer, static_cast<size_t>(bytes));
#endif
}

}  // namespace pymoe::cuda
