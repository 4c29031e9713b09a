// Tests the emulator itself: barriers, collectives, atomics and shared memory must behave as CUDA specifies.
#include <numeric>
#include "cuda_on_cpu/harness.h"

#include "kernels/cuda/async_copy.h"
#include "kernels/cuda/launch.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

constexpr unsigned kAll = cuda::kFullWarp;

__global__ void sum_of_block(const int* values, int* sums, int size) {
  PYMOE_SHARED(int, partial, 128);
  int sum = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) sum += values[blockIdx.x * size + i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned width = blockDim.x / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}

__global__ void collectives(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int* mine = out + threadIdx.x * 14;
  mine[0] = __shfl_sync(kAll, lane, 3);
  mine[1] = __shfl_sync(kAll, lane, 1, 8);
  mine[2] = __shfl_xor_sync(kAll, lane, 5);
  mine[3] = __shfl_down_sync(kAll, lane, 2, 16);
  mine[4] = __shfl_up_sync(kAll, lane, 2, 16);
  mine[5] = static_cast<int>(__ballot_sync(kAll, lane % 3 == 0));
  mine[6] = __any_sync(kAll, lane == 31);
  mine[7] = __all_sync(kAll, lane < 31);
  mine[8] = static_cast<int>(__match_any_sync(kAll, lane / 5));
  mine[9] = __reduce_max_sync(kAll, -lane);
  mine[10] = static_cast<int>(__reduce_add_sync(kAll, static_cast<unsigned>(lane)));
  mine[11] = __syncthreads_count(lane < 4);
  // Each half of a warp by itself, as after a branch.
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  mine[12] = __reduce_min_sync(half, lane);
  if (lane >= 16) mine[13] = __shfl_sync(half, lane, 20);
}

__global__ void count_in_blocks(unsigned* total, unsigned* histogram) {
  atomicAdd(total, 1u);
  atomicAdd(&histogram[(blockIdx.x * blockDim.x + threadIdx.x) % 7], 1u);
}

// With the fences, the last block to finish sees the writes of all others.
__global__ void sum_by_last_block(int* values, unsigned* finished, int* sum) {
  PYMOE_SHARED(int, is_last, 1);
  if (threadIdx.x == 0) {
    values[blockIdx.x] = static_cast<int>(blockIdx.x) + 1;
    __threadfence();
    is_last[0] = atomicAdd(finished, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (is_last[0] != 0 && threadIdx.x == 0) {
    __threadfence();
    for (unsigned i = 0; i < gridDim.x; ++i) *sum += values[i];
  }
}

__global__ void dynamic_shared(int* out, int size) {
  PYMOE_DYNAMIC_SHARED(int, memory);
  memory[size - 1 - static_cast<int>(threadIdx.x)] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = memory[threadIdx.x];
}

// Every thread starts three groups of copies, the second of them empty, and checks after each wait what has arrived.
__global__ void copies(const unsigned char* from, const int* bytes, uint32_t* seen) {
  PYMOE_SHARED(uint4, to, 32 * 2);
  const int thread = static_cast<int>(threadIdx.x);
  uint4* const mine = to + 2 * thread;
  mine[0] = mine[1] = uint4{1, 1, 1, 1};
  cuda::copy_async(mine, from + 16 * thread, bytes[thread]);
  cuda::commit_copies();
  cuda::commit_copies();
  cuda::copy_async(mine + 1, from + 16 * thread, 16);
  uint32_t* out = seen + 10 * thread;
  *out++ = mine[0].x;
  cuda::wait_for_copies<2>();  // only two groups so far, so this does not wait
  *out++ = mine[0].x;
  cuda::commit_copies();
  cuda::wait_for_copies<2>();
  for (const uint32_t word : {mine[0].x, mine[0].y, mine[0].z, mine[0].w}) *out++ = word;
  *out++ = mine[1].x;
  cuda::wait_for_copies<1>();
  *out++ = mine[1].x;
  cuda::wait_for_copies<0>();
  *out++ = mine[1].x;
  *out++ = mine[1].w;
}

}  // namespace

TEST_CASE("emulator: copies to shared memory arrive when they are waited for, and not before") {
  for_cases("emulator copies", 10, [](Random& random) {
    Buffer<unsigned char> from(32 * 16);
    for (auto& byte : from) byte = static_cast<unsigned char>(random.between(1, 200));
    Buffer<int> bytes(32);
    for (int& count : bytes) count = static_cast<int>(random.between(0, 16));
    Buffer<uint32_t> seen(32 * 10);
    cuda::launch("emulator: copies", copies, {1, 32}, nullptr, from.data(), bytes.data(), seen.data());
    for (int64_t thread = 0; thread < 32; ++thread) {
      unsigned char part[16] = {};
      memcpy(part, from.data() + 16 * thread, static_cast<size_t>(bytes[thread]));
      uint32_t words[4], whole[4];
      memcpy(words, part, 16);
      memcpy(whole, from.data() + 16 * thread, 16);
      const uint32_t expected[10] = {~0u, ~0u, words[0], words[1], words[2], words[3], ~0u, ~0u, whole[0], whole[3]};
      for (int64_t i = 0; i < 10; ++i) CHECK(seen[10 * thread + i] == expected[i]);
    }
  });
}

TEST_CASE("emulator: a block's sum through shared memory") {
  for_cases("emulator sum", 20, [](Random& random) {
    const auto blocks = random.between(1, size(9, 4)), length = random.between(1, 200);
    const int threads = static_cast<int>(random.one_of({32, 64, 128}));
    Buffer<int> values(blocks * length), sums(blocks);
    for (int& value : values) value = static_cast<int>(random.between(-9, 9));
    cuda::launch("emulator: sum", sum_of_block, {blocks, threads}, nullptr, values.data(), sums.data(),
                 static_cast<int>(length));
    for (int64_t block = 0; block < blocks; ++block) {
      int expected = 0;
      for (int64_t i = 0; i < length; ++i) expected += values[block * length + i];
      CHECK(sums[block] == expected);
    }
  });
}

TEST_CASE("emulator: warp collectives") {
  for_cases("emulator collectives", 20, [](Random&) {
    Buffer<int> out(64 * 14);
    cuda::launch("emulator: collectives", collectives, {1, 64}, nullptr, out.data());
    for (int thread = 0; thread < 64; ++thread) {
      const int lane = thread % 32;
      const int* mine = out.data() + thread * 14;
      unsigned thirds = 0, fives = 0;
      for (int i = 0; i < 32; ++i) {
        thirds |= static_cast<unsigned>(i % 3 == 0) << i;
        fives |= static_cast<unsigned>(i / 5 == lane / 5) << i;
      }
      CHECK(mine[0] == 3);
      CHECK(mine[1] == lane / 8 * 8 + 1);
      CHECK(mine[2] == (lane ^ 5));
      CHECK(mine[3] == (lane % 16 + 2 < 16 ? lane + 2 : lane));
      CHECK(mine[4] == (lane % 16 >= 2 ? lane - 2 : lane));
      CHECK(static_cast<unsigned>(mine[5]) == thirds);
      CHECK(mine[6] == 1);
      CHECK(mine[7] == 0);
      CHECK(static_cast<unsigned>(mine[8]) == fives);
      CHECK(mine[9] == 0);
      CHECK(mine[10] == 31 * 16);
      CHECK(mine[11] == 8);
      CHECK(mine[12] == (lane < 16 ? 0 : 16));
      if (lane >= 16) CHECK(mine[13] == 20);
    }
  });
}

TEST_CASE("emulator: atomics lose nothing, fences order blocks") {
  for_cases("emulator atomics", 20, [](Random& random) {
    const auto blocks = random.between(1, size(60, 8));
    Buffer<unsigned> total(1), histogram(7), finished(1);
    Buffer<int> values(blocks), sum(1);
    for (auto* counter : {&total, &histogram, &finished}) std::fill(counter->begin(), counter->end(), 0u);
    sum[0] = 0;
    cuda::launch("emulator: atomics", count_in_blocks, {blocks, 32}, nullptr, total.data(), histogram.data());
    cuda::launch("emulator: last block", sum_by_last_block, {blocks, 32}, nullptr, values.data(), finished.data(),
                 sum.data());
    CHECK(total[0] == 32 * blocks);
    CHECK(std::accumulate(histogram.begin(), histogram.end(), 0u) == 32 * blocks);
    CHECK(sum[0] == blocks * (blocks + 1) / 2);
  });
}

TEST_CASE("emulator: dynamic shared memory is the block's own") {
  Buffer<int> out(3 * 64);
  cuda::launch("emulator: dynamic", dynamic_shared, {3, 64, 64 * sizeof(int)}, nullptr, out.data(), 64);
  for (int i = 0; i < 3 * 64; ++i) CHECK(out[i] == 63 - i % 64);
}

TEST_CASE("emulator: launches that a GPU refuses are refused") {
  Buffer<int> out(1);
  CHECK_THROWS(cuda::launch("emulator: threads", dynamic_shared, {1, 1025, 16}, nullptr, out.data(), 1));
  CHECK_THROWS(cuda::launch("emulator: shared", dynamic_shared, {1, 32, 100 << 10}, nullptr, out.data(), 1));
  CHECK_THROWS(cuda::launch("emulator: grid", dynamic_shared, {int64_t{1} << 31, 32, 16}, nullptr, out.data(), 1));
  CHECK_NOTHROW(cuda::launch("emulator: nothing", dynamic_shared, {0, 32, 16}, nullptr, out.data(), 1));
}
