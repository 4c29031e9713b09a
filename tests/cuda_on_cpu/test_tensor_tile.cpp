// Tests the basis of grouped_linear's tensor-core tiles: the instructions, and the layout of packs in shared memory.
#include <doctest/doctest.h>

#include <algorithm>

#include "cuda_on_cpu/harness.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tensor_tile.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

__global__ void multiply_kernel(const BFloat16* a, const BFloat16* b, float* c) {
  const int group = static_cast<int>(threadIdx.x) >> 2, in_group = static_cast<int>(threadIdx.x) % 4;
  const auto pack = [](BFloat16 low, BFloat16 high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; };
  const auto a_at = [&](int i) {  // as the PTX ISA numbers a thread's elements: a0 ... a7, b0 ... b3, c0 ... c3
    const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
    const int column = i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
    return a[row * 16 + column];
  };
  const auto b_at = [&](int i) {
    const int row = i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
    return b[row * 8 + group];
  };
  float sums[4] = {};
  cuda::multiply_add(TypeTag<BFloat16>{}, sums,
                     {pack(a_at(0), a_at(1)), pack(a_at(2), a_at(3)), pack(a_at(4), a_at(5)), pack(a_at(6), a_at(7))},
                     pack(b_at(0), b_at(1)), pack(b_at(2), b_at(3)));
  for (int i = 0; i < 4; ++i) c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = sums[i];
}

__global__ void load_kernel(const uint16_t* from, uint32_t* straight, uint32_t* transposed) {
  PYMOE_SHARED(uint16_t, tile, 4 * 8 * 8);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) tile[i] = from[i];
  __syncthreads();
  uint32_t to[4];
  cuda::load_matrices(to, tile, lane * 8);
  for (int i = 0; i < 4; ++i) straight[i * 32 + lane] = to[i];
  cuda::load_matrices_transposed(to, tile, lane * 8);
  for (int i = 0; i < 4; ++i) transposed[i * 32 + lane] = to[i];
}

// Has a loader begin the copies of one tile, and a warp read every block of it. `written` gets for each copy of each
// thread the pack of shared memory to which it goes, `read` for each load of matrices the packs of the 32 lanes.
template <int kRows, bool kAlongRows, bool kIsB>
__global__ void banks_kernel(cuda::TensorOperand<BFloat16> operand, int32_t* written, int32_t* read) {
  constexpr int kElements = cuda::TensorLayout<kRows, kAlongRows>::kElements, kPart = kRows / 2;
  PYMOE_SHARED(uint4, shared, kElements / cuda::kTensorPack);
  auto* const tile = reinterpret_cast<BFloat16*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  cuda::TensorLoader<BFloat16, kRows, kAlongRows>(operand, kRows).fetch(tile, cuda::kStepDepth);
  cuda::commit_copies();
  emulator::Copy copy;
  for (int i = thread; emulator::next_copy(0, copy); i += cuda::kTensorThreads) {
    written[i] = static_cast<int32_t>((copy.to - reinterpret_cast<unsigned char*>(tile)) / emulator::kCopied);
  }
  __syncthreads();
  for (int i = thread; i < kElements; i += cuda::kTensorThreads) tile[i].bits = static_cast<uint16_t>(i);
  __syncthreads();
  if (thread >= 32) return;
  for (int first = 0; first < kRows; first += kPart) {
    const cuda::TensorBlocks<kRows, kAlongRows, kIsB> blocks(first);
    for (int i = 0; i < kPart / 16; ++i) {
      for (int k = 0; k < cuda::kStepDepth / 16; ++k, read += 32) {
        uint32_t elements[4];
        blocks.load(elements, tile, i, k);
        for (int matrix = 0; matrix < 4; ++matrix) {  // every element is its own index
          const int group = thread / 4, in_group = thread % 4, low = static_cast<int>(elements[matrix] & 0xffff);
          const int high = static_cast<int>(elements[matrix] >> 16);
          if (kAlongRows && group == 0) {
            read[matrix * 8 + 2 * in_group] = low / cuda::kTensorPack;
            read[matrix * 8 + 2 * in_group + 1] = high / cuda::kTensorPack;
          } else if (!kAlongRows && in_group == 0) {
            read[matrix * 8 + group] = low / cuda::kTensorPack;
          }
        }
      }
    }
  }
}

// Counts how often shared memory must be accessed again for a warp's 16-byte accesses. It serves eight lanes at a time,
// at once if their packs lie in different eighths of its 32 banks.
int bank_conflicts(const Buffer<int32_t>& packs) {
  int conflicts = 0;
  for (int64_t first = 0; first < packs.size(); first += 8) {
    int in_bank[8] = {};
    for (int64_t i = first; i < first + 8; ++i) ++in_bank[packs[i] % 8];
    conflicts += *std::max_element(in_bank, in_bank + 8) - 1;
  }
  return conflicts;
}

template <int kRows, bool kAlongRows, bool kIsB>
void check_banks() {
  constexpr int kPacks = cuda::TensorLayout<kRows, kAlongRows>::kPacks;
  Buffer<BFloat16> from(kPacks * cuda::kTensorPack);
  Buffer<int32_t> written(kPacks), read(kPacks);
  for (Buffer<int32_t>* packs : {&written, &read}) std::fill(packs->begin(), packs->end(), -1);
  const auto operand = cuda::tensor_operand<BFloat16>(from.data(), kAlongRows ? kRows : cuda::kStepDepth, 1);
  REQUIRE(operand.whole);
  cuda::launch("emulator: banks", banks_kernel<kRows, kAlongRows, kIsB>, {1, cuda::kTensorThreads}, nullptr, operand,
               written.data(), read.data());
  CHECK(bank_conflicts(written) == 0);
  CHECK(bank_conflicts(read) == 0);
  for (Buffer<int32_t>* packs : {&written, &read}) {  // all packs, each once
    std::sort(packs->begin(), packs->end());
    for (int32_t i = 0; i < kPacks; ++i) REQUIRE((*packs)[i] == i);
  }
}

}  // namespace

TEST_CASE("tensor_tile: the tensor core's instructions have the PTX ISA's layouts") {
  for_cases("mma", 12, [](Random& random) {
    Buffer<BFloat16> a(16 * 16), b(16 * 8);
    Buffer<float> c(16 * 8);
    for (Buffer<BFloat16>* buffer : {&a, &b}) {
      for (BFloat16& value : *buffer) value = round_to<BFloat16>(static_cast<float>(random.between(-2, 2)));
    }
    cuda::launch("mma", multiply_kernel, {1, 32}, nullptr, a.data(), b.data(), c.data());
    for (int64_t row = 0; row < 16; ++row) {
      for (int64_t column = 0; column < 8; ++column) {
        float sum = 0;
        for (int64_t k = 0; k < 16; ++k) sum += to_accumulate(a[row * 16 + k]) * to_accumulate(b[k * 8 + column]);
        REQUIRE(c[row * 8 + column] == sum);
      }
    }
    Buffer<uint16_t> from(256);
    for (int64_t i = 0; i < 256; ++i) from[i] = static_cast<uint16_t>(random.between(0, 65535));
    Buffer<uint32_t> straight(128), transposed(128);
    cuda::launch("ldmatrix", load_kernel, {1, 32}, nullptr, from.data(), straight.data(), transposed.data());
    for (int64_t matrix = 0; matrix < 4; ++matrix) {
      for (int64_t row = 0; row < 8; ++row) {
        for (int64_t column = 0; column < 8; ++column) {
          const auto half = [&](const Buffer<uint32_t>& registers, int64_t r, int64_t k) {
            return static_cast<uint16_t>(registers[matrix * 32 + r * 4 + k / 2] >> (k % 2 * 16));
          };
          REQUIRE(half(straight, row, column) == from[matrix * 64 + row * 8 + column]);
          REQUIRE(half(transposed, column, row) == from[matrix * 64 + row * 8 + column]);
        }
      }
    }
  });
}

TEST_CASE("tensor_tile: packs that lanes write or read together are in different banks") {
  check_banks<64, false, false>();
  check_banks<128, false, false>();
  check_banks<128, false, true>();
  check_banks<128, true, false>();
  check_banks<128, true, true>();
}

TEST_CASE("tensor_tile: lanes that meet in a bank are counted") {
  Buffer<int32_t> packs(16);
  for (int32_t i = 0; i < 16; ++i) packs[i] = i < 8 ? i : 4 * i;  // the last eight meet in two banks
  CHECK(bank_conflicts(packs) == 3);
}
