// Tests the basis of grouped_linear's tensor-core tiles: the instructions, and the layout of packs in shared memory.
#include <doctest/doctest.h>

#include <vector>

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

// Shared memory serves eight 16-byte accesses at once if their indices differ modulo eight.
template <int kRows, bool kAlongRows>
void check_banks() {
  using Layout = cuda::TensorLayout<kRows, kAlongRows>;
  const auto differ = [](auto place_of) {
    unsigned banks = 0;
    for (int i = 0; i < 8; ++i) banks |= 1u << place_of(i) % 8;
    return banks == 0xff;
  };
  std::vector<bool> used(Layout::kPacks);
  constexpr int kLines = Layout::kPacks / Layout::kAcross;
  for (int line = 0; line < kLines; ++line) {
    for (int across = 0; across < Layout::kAcross; ++across) {
      const auto place = static_cast<size_t>(Layout::place(line, across));
      REQUIRE(place < used.size());
      CHECK(!used[place]);
      used[place] = true;
      // ldmatrix reads one pack from each of eight lines; a row of a matrix is a pack of a line.
      if (line % 8 == 0) CHECK(differ([&](int i) { return Layout::place(line + i, across); }));
    }
  }
  for (int thread = 0; thread < Layout::kPacks; thread += 8) {  // cp.async writes packs in the order of threads
    CHECK(differ([&](int i) { return Layout::place((thread + i) / Layout::kAcross, (thread + i) % Layout::kAcross); }));
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

TEST_CASE("tensor_tile: packs that are read or written together lie in different banks") {
  check_banks<64, false>();
  check_banks<128, false>();
  check_banks<128, true>();
}
