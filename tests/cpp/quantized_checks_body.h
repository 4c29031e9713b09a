// Multiplies a tile of weights by rows, by vectors and by emulated tiles; compiled once per instruction set.
#include "kernels/quantized_linear_cpu_body.h"
#if !PYMOE_ISA_HAS_BF16
#include "kernels/quantized_linear_amx.h"
#endif

namespace pymoe::cpu::PYMOE_ISA {

// Rounds the rows, or widens them, and multiplies them, as quantized_linear does with the rows of one expert.
template <typename T>
void multiply_rounded(const test::TileCall<T>& call, int64_t bytes,
                      void (*round)(const T*, int64_t, int8_t*, RoundedBlock&),
                      void (*multiply)(const uint8_t*, int64_t, const RoundedRows&, const T*, T*, int64_t, int64_t)) {
  const int64_t blocks = rounded_blocks(call.inputs);
  const test::Guarded<int8_t> codes(blocks * call.rows * bytes, true);
  const test::Guarded<RoundedBlock> rounded(blocks * call.rows, true);
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kRoundedInputs, count = call.inputs - first;
      round(call.x + row * call.inputs + first, count < kRoundedInputs ? count : kRoundedInputs,
            codes.data() + (block * call.rows + row) * bytes, rounded[block * call.rows + row]);
    }
  }
  const RoundedRows rows{codes.data(), call.rows * bytes, rounded.data(), call.rows, call.rows};
  multiply(call.tile, call.inputs, rows, call.bias, call.out, call.row_stride, call.count);
}

template <WeightFormat kFormat, typename T>
void by_vectors(const test::TileCall<T>& call) {
  if constexpr (is_fused(kFormat)) {
    multiply_rounded<T>(call, kWidenedBytes, &widen_block<T>, &multiply_tile_fused<kFormat, T>);
  } else {
    multiply_rounded<T>(call, kRoundedBytes, &round_block<Integers::kForVectors, T>, &multiply_tile<kFormat, T>);
  }
}

template <WeightFormat kFormat, typename T, typename Tiles>
void by_tiles(const test::TileCall<T>& call) {
  constexpr Integers kIntegers = integers_for_tiles(kFormat);
  multiply_rounded<T>(call, rounded_bytes(kIntegers), &round_block<kIntegers, T>,
                      &multiply_tile_by_tiles<kFormat, T, Tiles>);
}

}  // namespace pymoe::cpu::PYMOE_ISA
