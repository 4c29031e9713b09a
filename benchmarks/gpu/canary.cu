// Contains faults that compute-sanitizer must report, one per run: canary memcheck|racecheck|initcheck|synccheck|none.
// If a tool misses its planted fault, a clean report on pymoe's kernels means nothing.
#include <cstdio>
#include <cstring>

#include <cuda_runtime.h>

__global__ void pymoe_canary_memcheck(int* values, int size) { values[size + threadIdx.x] = 1; }

__global__ void pymoe_canary_racecheck(int* values) {
  __shared__ int tile[64];
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);  // no barrier before reading another warp's element
  values[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void pymoe_canary_initcheck(const int* never_written, int* values) {
  values[threadIdx.x] = never_written[threadIdx.x] + 1;
}

__global__ void pymoe_canary_synccheck(int* values) {
  if (threadIdx.x % 2 == 0) __syncthreads();
  values[threadIdx.x] = 1;
}

__global__ void pymoe_canary_none(int* values) { values[threadIdx.x] = 1; }

int main(int argc, char** argv) {
  const char* fault = argc > 1 ? argv[1] : "none";
  int *values = nullptr, *never_written = nullptr;
  if (cudaMalloc(&values, 64 * sizeof(int)) != cudaSuccess ||
      cudaMalloc(&never_written, 64 * sizeof(int)) != cudaSuccess) {
    std::printf("no device memory: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 2;
  }
  if (std::strcmp(fault, "memcheck") == 0) {
    pymoe_canary_memcheck<<<1, 64>>>(values, 64);
  } else if (std::strcmp(fault, "racecheck") == 0) {
    pymoe_canary_racecheck<<<1, 64>>>(values);
  } else if (std::strcmp(fault, "initcheck") == 0) {
    pymoe_canary_initcheck<<<1, 64>>>(never_written, values);
  } else if (std::strcmp(fault, "synccheck") == 0) {
    pymoe_canary_synccheck<<<1, 64>>>(values);
  } else {
    pymoe_canary_none<<<1, 64>>>(values);
  }
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s: %s\n", fault, cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 3;
}
