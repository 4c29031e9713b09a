// Decodes the weights of a packed tile, for quantized_linear_input_grad (see quantized_linear.h; no include guard on
// purpose).
//
// A vector holds the weights of one input for as many outputs as it has lanes. Every lane decodes a weight by the steps
// of dequantize_weight (pymoe/reference/quantized_weight.py), and then rounds it to T.

namespace pymoe::cpu::PYMOE_ISA {

// Returns the values of mxfp4 codes; ignores the upper bits of a lane.
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

// Rounds two vectors to T and stores them one after the other.
template <typename T>
PYMOE_INLINE void store_two(T* target, vfloat first, vfloat second) {
#if PYMOE_ISA_HAS_BF16
  // One instruction rounds both vectors. Like this processor's products of bf16, it flushes subnormal numbers to zero.
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(target, both);
    return;
  }
#endif
  store(target, first);
  store(target + kLanes<float>, second);
}

// Writes the weights of one tile for the inputs from `first`, a multiple of 32, to `last` - 1, and for its first
// `outputs` <= 64 outputs. The weight of input i and output j goes to out[(i - first) * stride + j].
template <WeightFormat kFormat, typename T>
void decode_inputs(const uint8_t* tile, int64_t first, int64_t last, int64_t outputs, T* out, int64_t stride) {
  constexpr int kWidth = kLanes<float>;
  const auto put = [&](int64_t input, int64_t output, vfloat low, vfloat high) __attribute__((always_inline)) {
    T* to = out + (input - first) * stride + output;
    if (output + 2 * kWidth <= outputs) {
      store_two(to, low, high);
      return;
    }
    alignas(64) T both[2 * kWidth];
    store_two(both, low, high);
    if (output < outputs) memcpy(to, both, static_cast<size_t>(outputs - output) * sizeof(T));
  };
  if constexpr (is_fused(kFormat)) {
    constexpr int kVectors = 4;
    using Stored = StoredCodes<kFormat, kVectors>;
    for (int64_t output = 0; output < outputs; output += kVectors * kWidth) {
      Stored stored({tile, output, nullptr});
      for (int64_t begin = first, end = first; begin < last; begin = end) {
        const int64_t run = begin / Stored::kRun * Stored::kRun;  // `first` may lie inside a run
        end = last - run < Stored::kRun ? last : run + Stored::kRun;
        const auto* scales = reinterpret_cast<const float*>(tile + fused_begin(kFormat, run)) + output;  // of fp8
        stored.begin_run(run);
        for (int64_t input = begin; input < end; input += Stored::kInputs) {
          vfloat values[Stored::kInputs][kVectors];
          stored.load_inputs(input - run, values);
#pragma GCC unroll 4
          for (int i = 0; i < Stored::kInputs; ++i) {
            if (input + i == end) break;
            if constexpr (kFormat == WeightFormat::kFp8) {
#pragma GCC unroll 4
              for (int v = 0; v < kVectors; ++v) {
                const vint32 nan = ((vint32)values[i][v] & 0x7fffffff) == (vint32)broadcast(480.0f);
                values[i][v] = (vfloat)((vint32)values[i][v] | nan) * load(scales + v * kWidth);
              }
            }
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v += 2) {
              put(input + i, output + v * kWidth, values[i][v], values[i][v + 1]);
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
      if (kFormat == WeightFormat::kInt4 && (begin == first || group % kSuperGroups == 0)) {
        decode_ends(tile, super, ends);
      }
      const uint8_t* from =
          super + quantized_super_bytes(kFormat) + group % kSuperGroups * quantized_group_bytes(kFormat);
      const uint8_t* words = from + quantized_ends_bytes(kFormat);
      const int64_t end = last - begin < kQuantizedGroup ? last : begin + kQuantizedGroup;
      for (int64_t output = 0; output < outputs; output += 2 * kWidth) {
        vfloat scales[2], minima[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int64_t at = output + v * kWidth;
          if constexpr (kFormat == WeightFormat::kInt8) {
            scales[v] = load(reinterpret_cast<const float*>(tile) + at);
          } else {
            scales[v] = load_scales<kFormat>(from, ends.of_group(group), at);
          }
          minima[v] = kFormat == WeightFormat::kInt4 ? load(ends.of_group(group) + SuperEnds::kMinima + at) : vfloat{};
        }
        for (int64_t input = begin; input < end; input += kTogether) {
          const uint8_t* word = words + (input - begin) / kTogether * 4 * kQuantizedTile + 4 * output;
          const vuint32 both[2] = {(vuint32)load_words(word), (vuint32)load_words(word + kVectorBytes)};
#pragma GCC unroll 8
          for (int i = 0; i < kTogether; ++i) {
            if (input + i == end) break;
            vfloat weights[2];
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
              if constexpr (kFormat == WeightFormat::kInt8) {
                weights[v] = to_float((vint32)(both[v] >> 8 * i & 255) - 128) * scales[v];
              } else {
                const auto codes = (vint32)(both[v] >> (i % 4 * 8 + i / 4 * 4));
                weights[v] = kFormat == WeightFormat::kMxfp4 ? e2m1_values(codes) * scales[v]
                                                             : to_float(codes & 15) * scales[v] + minima[v];
              }
            }
            put(input + i, output, weights[0], weights[1]);
          }
        }
      }
    }
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
