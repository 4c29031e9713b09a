// The weights of a packed tile as numbers, for quantized_linear_input_grad (see quantized_linear.h; no include guard on
// purpose).
//
// A vector holds the weights of one input for as many outputs as it has lanes. Every lane takes the steps of
// dequantize_weight (pymoe/reference/quantized_weight.py), and its weight is then rounded to T.

namespace pymoe::cpu::PYMOE_ISA {

// The values of codes of mxfp4; the upper bits of a lane are not read.
PYMOE_INLINE vfloat e2m1_values(vint32 codes) {
#if PYMOE_ISA_LEVEL == 4
  alignas(64) static constexpr float kValues[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                                    -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  return (vfloat)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(kValues));
#else
  alignas(32) static constexpr float kSizes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
#if PYMOE_ISA_LEVEL == 3
  const auto sizes = (vint32)_mm256_permutevar8x32_ps(_mm256_load_ps(kSizes), (__m256i)codes);
#else
  vfloat found{};
  for (int lane = 0; lane < kLanes<float>; ++lane) found[lane] = kSizes[codes[lane] & 7];
  const auto sizes = (vint32)found;
#endif
  return (vfloat)(sizes | (codes & 8) << 28);
#endif
}

// Writes the weights of the inputs from `first`, a multiple of 32, to `last` for the `outputs` <= 64 outputs of a tile:
// that of input i and output j becomes out[(i - first) * stride + j].
template <WeightFormat kFormat, typename T>
void decode_inputs(const uint8_t* tile, int64_t first, int64_t last, int64_t outputs, T* out, int64_t stride) {
  constexpr int kWidth = kLanes<float>;
  const auto put = [&](int64_t input, int64_t output, vfloat weight) __attribute__((always_inline)) {
    T* to = out + (input - first) * stride + output;
    if (output + kWidth <= outputs) {
      store(to, weight);
    } else if (output < outputs) {
      store_partial(to, weight, static_cast<int>(outputs - output));
    }
  };
  if constexpr (is_fused(kFormat)) {
    constexpr int kVectors = 4;
    using Stored = StoredCodes<kFormat, kVectors>;
    for (int64_t output = 0; output < outputs; output += kVectors * kWidth) {
      Stored stored({tile, output, nullptr});
      for (int64_t begin = first; begin < last; begin += kQuantizedGroup) {
        const int64_t run = begin / Stored::kRun * Stored::kRun;
        const int64_t end = last - begin < kQuantizedGroup ? last : begin + kQuantizedGroup;
        const auto* scales = reinterpret_cast<const float*>(tile + fused_begin(kFormat, run)) + output;  // of fp8
        stored.begin_run(run);
        for (int64_t input = begin; input < end; input += Stored::kInputs) {
          vfloat values[Stored::kInputs][kVectors];
          stored.load_inputs(input - run, values);
#pragma GCC unroll 2
          for (int i = 0; i < Stored::kInputs; ++i) {
            if (input + i == end) break;
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
              vfloat weight = values[i][v];
              if constexpr (kFormat == WeightFormat::kFp8) {
                const vint32 nan = ((vint32)weight & 0x7fffffff) == (vint32)broadcast(480.0f);
                weight = (vfloat)((vint32)weight | nan) * load(scales + v * kWidth);
              }
              put(input + i, output + v * kWidth, weight);
            }
          }
        }
      }
    }
  } else {
    constexpr int64_t kTogether = bits_of(kFormat) == 8 ? 4 : 8;  // inputs of a word
    constexpr int64_t kSuperBytes =
        quantized_super_bytes(kFormat) + kSuperGroups * quantized_group_bytes(kFormat);  // of int4
    SuperEnds ends;                                                                      // of int4
    for (int64_t begin = first; begin < last; begin += kQuantizedGroup) {
      const int64_t group = begin / kQuantizedGroup;
      const uint8_t* super = tile + quantized_head_bytes(kFormat) + group / kSuperGroups * kSuperBytes;
      if (kFormat == WeightFormat::kInt4 && (begin == first || group % kSuperGroups == 0))
        decode_ends(tile, super, ends);
      const uint8_t* from =
          super + quantized_super_bytes(kFormat) + group % kSuperGroups * quantized_group_bytes(kFormat);
      const uint8_t* words = from + quantized_ends_bytes(kFormat);
      const int64_t end = last - begin < kQuantizedGroup ? last : begin + kQuantizedGroup;
      for (int64_t input = begin; input < end; input += kTogether, words += 4 * kQuantizedTile) {
        for (int64_t output = 0; output < outputs; output += kWidth) {
          const vint32 word = load_words(words + 4 * output);
          const auto weight = [&](vint32 codes) __attribute__((always_inline)) {
            if constexpr (kFormat == WeightFormat::kInt8) {
              return to_float((codes & 255) - 128) * load(reinterpret_cast<const float*>(tile) + output);
            } else if constexpr (kFormat == WeightFormat::kMxfp4) {
              return e2m1_values(codes) * load_powers(from + output);
            } else {
              const float* its_ends = ends.of_group(group) + output;
              return to_float(codes & 15) * load(its_ends) + load(its_ends + SuperEnds::kMinima);
            }
          };
#pragma GCC unroll 8
          for (int i = 0; i < kTogether; ++i) {
            if (input + i < end) {
              put(input + i, output,
                  weight((vint32)((vuint32)word >> (bits_of(kFormat) == 8 ? 8 * i : i % 4 * 8 + i / 4 * 4))));
            }
          }
        }
      }
    }
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
