// EmulatedTiles: the tile registers of csrc/kernels/cpu/amx_tiles.h in plain C++, for machines without AMX and for
// sanitizers, which do not see what an AMX instruction reads. Where the instructions can run, test_amx_gemm.cpp
// compares them with this emulation, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace pymoe::test {

// Replaces subnormals by zero, as operands and as results. (A processor decides before a result is rounded, so the two
// differ only for a result within 2^-151 of the smallest normal number.)
inline float flushed(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  return (bits & 0x7f800000u) == 0 ? bit_cast<float>(bits & 0x80000000u) : value;
}

inline float multiply_add_flushed(BFloat16 a, BFloat16 b, float sum) {
  return flushed(std::fma(flushed(to_accumulate(a)), flushed(to_accumulate(b)), flushed(sum)));
}

// Returns `sum` after a tile of 32 steps has added to it; `a` and `b` give the factors of a step.
template <typename A, typename B>
float add_tile(float sum, const A& a, const B& b) {
  float even = 0, odd = 0;
  for (int64_t pair = 0; pair < 16; ++pair) {
    even = multiply_add_flushed(a(2 * pair), b(2 * pair), even);
    odd = multiply_add_flushed(a(2 * pair + 1), b(2 * pair + 1), odd);
  }
  return flushed(flushed(sum) + flushed(even + odd));
}

class EmulatedTiles {
 public:
  explicit EmulatedTiles(int64_t left_rows) : left_rows_(left_rows) {}
  EmulatedTiles(const EmulatedTiles&) = delete;
  EmulatedTiles& operator=(const EmulatedTiles&) = delete;

  template <int kTile>
  void zero() {
    memset(tile_[kTile], 0, sizeof(tile_[kTile]));
  }
  template <int kTile>
  void load(const void* rows, int64_t row_bytes) {
    zero<kTile>();
    for (int64_t i = 0; i < this->rows(kTile); ++i) {
      memcpy(tile_[kTile][i], static_cast<const char*>(rows) + i * row_bytes, 64);
    }
  }
  template <int kTile>
  void store(void* rows, int64_t row_bytes) {
    for (int64_t i = 0; i < this->rows(kTile); ++i) {
      memcpy(static_cast<char*>(rows) + i * row_bytes, tile_[kTile][i], 64);
    }
  }
  template <int kSum, int kLeft, int kRight>
  void multiply() {
    for (int64_t i = 0; i < left_rows_; ++i) {
      for (int64_t j = 0; j < 16; ++j) {
        const float sum = add_tile(
            bit_cast<float>(tile_[kSum][i][j]), [&](int64_t p) { return half(tile_[kLeft][i][p / 2], p); },
            [&](int64_t p) { return half(tile_[kRight][p / 2][j], p); });
        tile_[kSum][i][j] = bit_cast<uint32_t>(sum);
      }
    }
  }
  // Multiplies signed bytes on the left by unsigned bytes on the right.
  template <int kSum, int kLeft, int kRight>
  void multiply_bytes() {
    for (int64_t i = 0; i < left_rows_; ++i) {
      for (int64_t j = 0; j < 16; ++j) {
        for (int64_t p = 0; p < 64; ++p) {
          const auto left = static_cast<int8_t>(tile_[kLeft][i][p / 4] >> (p % 4 * 8));
          const auto right = static_cast<uint8_t>(tile_[kRight][p / 4][j] >> (p % 4 * 8));
          tile_[kSum][i][j] += static_cast<uint32_t>(left * right);
        }
      }
    }
  }

 private:
  static BFloat16 half(uint32_t pair, int64_t p) { return BFloat16{static_cast<uint16_t>(pair >> (p % 2 * 16))}; }
  int64_t rows(int tile) const { return tile < 6 ? left_rows_ : 16; }

  int64_t left_rows_;
  uint32_t tile_[8][16][16] = {};
};

}  // namespace pymoe::test
