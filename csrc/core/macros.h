// Compiler spellings used by every layer. Nothing here depends on torch or Python.
#pragma once

#if defined(__CUDACC__)
#define PYMOE_HOST_DEVICE __host__ __device__
#else
#define PYMOE_HOST_DEVICE
#endif

// Functions of the inner loops: inlined whatever the optimiser's size estimate says.
#define PYMOE_INLINE inline __attribute__((always_inline))

#define PYMOE_RESTRICT __restrict__
