// Kernels with planted errors. The build for an error's kind must report it; ctest looks for the report.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/cuda/async_copy.h"
#include "kernels/cuda/launch.h"

namespace {

using pymoe::cuda::launch;

// A barrier is missing between a write and a read: wrong values, and a race.
__global__ void missing_barrier(const int* x, int* out) {
  PYMOE_SHARED(int, reversed, 64);
  reversed[63 - threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = reversed[threadIdx.x];
}

// Half of the threads never reach the barrier.
__global__ void divergent_barrier(const int* x, int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];
}

// One lane does not take part in a collective whose mask includes it.
__global__ void divergent_shuffle(const int* x, int* out) {
  if (threadIdx.x != 5) out[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], 0);
}

// Blocks add to one place without an atomic. The sum is right here, since nothing runs between load and store.
__global__ void lost_atomic(const int* x, int* out) {
  if (threadIdx.x == 0) out[0] += x[blockIdx.x];
}

// One block signals another by a flag, without a fence between the data and the flag.
__global__ void missing_fence(int* data, int* out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    data[1] = 42;
    atomicExch(&data[0], 1);
  } else if (blockIdx.x == 1) {
    while (atomicAdd(&data[0], 0) == 0) __nanosleep(20);
    __threadfence();
    out[0] = data[1];
  }
}

__global__ void out_of_bounds(const int* x, int* out) { out[threadIdx.x] = x[threadIdx.x + 1]; }

__global__ void shared_out_of_bounds(const int* x, int* out) {
  PYMOE_SHARED(int, values, 64);
  values[threadIdx.x + 1] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

// Every block waits for the next one, as if all blocks ran at the same time.
__global__ void waits_for_later_block(const int*, int* out) {
  if (threadIdx.x != 0) return;
  while (blockIdx.x + 1 < gridDim.x && atomicAdd(&out[blockIdx.x + 1], 0) == 0) __nanosleep(20);
  atomicExch(&out[blockIdx.x], 1);
}

// Copies that no thread waits for, or with an invalid destination.
__global__ void copy_without_wait(const int* x, int*) {
  PYMOE_SHARED(uint4, to, 16);
  if (threadIdx.x < 4) pymoe::cuda::copy_async(to + threadIdx.x, x + 4 * threadIdx.x, 16);
  pymoe::cuda::commit_copies();
}

__global__ void misaligned_copy(const int* x, int*) {
  PYMOE_SHARED(uint4, to, 16);
  pymoe::cuda::copy_async(to, x + 1, 16);
  pymoe::cuda::commit_copies();
  pymoe::cuda::wait_for_copies<0>();
}

// A thread reads data that another thread has copied and waited for, without a barrier in between.
__global__ void copy_without_barrier(const int* x, int* out) {
  PYMOE_SHARED(uint4, to, 16);
  if (threadIdx.x < 16) pymoe::cuda::copy_async(to + threadIdx.x, x + 4 * threadIdx.x, 16);
  pymoe::cuda::commit_copies();
  pymoe::cuda::wait_for_copies<0>();
  out[threadIdx.x] = reinterpret_cast<const int*>(to)[63 - threadIdx.x];
}

// A copy reads past the end of its source.
__global__ void copy_out_of_bounds(const int* x, int* out) {
  PYMOE_SHARED(uint4, to, 17);
  if (threadIdx.x < 17) pymoe::cuda::copy_async(to + threadIdx.x, x + 4 * threadIdx.x, threadIdx.x < 16 ? 16 : 2);
  pymoe::cuda::commit_copies();
  pymoe::cuda::wait_for_copies<0>();
  __syncthreads();
  out[threadIdx.x] = static_cast<int>(to[threadIdx.x % 17].x);
}

}  // namespace

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "";
  std::vector<int> x(64), out(64);
  for (int i = 0; i < 64; ++i) x[static_cast<size_t>(i)] = i;
  const auto run = [&](const char* which, void (*kernel)(const int*, int*), int64_t blocks, int threads) {
    if (std::strcmp(name, which) == 0) launch(which, kernel, {blocks, threads}, nullptr, x.data(), out.data());
  };
  run("missing_barrier", missing_barrier, 1, 64);
  run("divergent_barrier", divergent_barrier, 1, 64);
  run("divergent_shuffle", divergent_shuffle, 1, 32);
  run("lost_atomic", lost_atomic, 4, 32);
  run("out_of_bounds", out_of_bounds, 1, 64);
  run("shared_out_of_bounds", shared_out_of_bounds, 1, 64);
  run("waits_for_later_block", waits_for_later_block, 64, 1024);
  run("copy_without_wait", copy_without_wait, 1, 32);
  run("misaligned_copy", misaligned_copy, 1, 32);
  run("copy_without_barrier", copy_without_barrier, 1, 64);
  run("copy_out_of_bounds", copy_out_of_bounds, 1, 64);
  if (std::strcmp(name, "missing_fence") == 0) {
    x[0] = 0;
    launch(name, missing_fence, {2, 32}, nullptr, x.data(), out.data());
  }
  bool right = true;
  for (int i = 0; i < 64; ++i)
    right = right && (std::strcmp(name, "missing_barrier") != 0 || out[static_cast<size_t>(i)] == 63 - i);
  std::printf("canary '%s' has run: %s\n", name, right ? "right values" : "wrong values");
  return 0;
}
