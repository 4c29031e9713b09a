// Macros for compiler-specific syntax, used everywhere. Nothing here depends on torch or Python.
#pragma once

#if defined(__CUDACC__)
#define PYMOE_HOST_DEVICE __host__ __device__
#else
#define PYMOE_HOST_DEVICE
#endif

// Specifiers of functions in inner loops: always inlined, whatever the optimiser estimates.
#define PYMOE_INLINE inline __attribute__((always_inline))

#define PYMOE_RESTRICT __restrict__
