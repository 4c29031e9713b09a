// Copies from global to shared memory that use no register: cp.async, which every GPU from sm_80 on has.
//
//   copy_async        begins to fill 16 bytes of shared memory: the first `bytes` of them (0 to 16) from global memory,
//                     the rest with zeros. Both addresses are multiples of 16. No more than `bytes` are read; if
//                     that is 0, the address may be anything.
//   commit_copies     makes a group of the copies that the thread has begun since the last group; it may be empty.
//   wait_for_copies   returns once all of the thread's groups have arrived except the kPending latest ones. Copies of
//                     other threads are visible after they have waited and a barrier has been passed.
#pragma once

#include <cstdint>

#include "kernels/cuda/platform.h"

#if defined(__CUDACC__)

namespace pymoe::cuda {

PYMOE_DEVICE void copy_async(void* to, const void* from, int bytes) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(__cvta_generic_to_global(from)), "r"(bytes)
      : "memory");
}

PYMOE_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
PYMOE_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace pymoe::cuda

#else

#include "cuda_on_cpu/async_copy.h"

#endif
