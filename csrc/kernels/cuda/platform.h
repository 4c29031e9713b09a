// The only part of a kernel file that depends on CUDA. nvcc uses the toolkit; every other compiler uses the emulator
// of the tests (tests/cuda_on_cpu), so that the kernels that ship are also run, and searched for races and overruns, on
// machines without a GPU. A kernel file therefore includes this instead of <cuda_runtime.h>, declares shared memory
// with the macros below, is started by kernels/cuda/launch.h, and uses only intrinsics that the emulator has
// (tests/cuda_on_cpu/device.h lists them). It has no host synchronisation, no float atomics and no static state.
#pragma once

#include "core/macros.h"

#if defined(__CUDACC__)

#include <cuda_runtime.h>

// Declares an array in the shared memory of a block: PYMOE_SHARED(float, tile, 256);
#define PYMOE_SHARED(Type, name, count) __shared__ Type name[count]

// Declares the shared memory whose size the launch sets, aligned to 16 bytes; at most once in a kernel.
#define PYMOE_DYNAMIC_SHARED(Type, name)                                \
  extern __shared__ __align__(16) unsigned char pymoe_dynamic_shared[]; \
  Type* const name = reinterpret_cast<Type*>(pymoe_dynamic_shared)

// Specifiers of device functions: always inlined, whatever the optimiser estimates.
#define PYMOE_DEVICE __device__ __forceinline__

#else

#include "cuda_on_cpu/device.h"

#endif
