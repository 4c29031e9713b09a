// The products of quantized_linear with weights in fp8 (see quantized_linear.h; no include guard on purpose).
//
// A vector holds the values of the codes of as many outputs as it has lanes. The sum of a block of 128 inputs starts
// from zero and takes one fused multiply-add per input, in the order of the inputs; then y += sum * scale, with both
// steps rounded. These are IEEE operations on single lanes, so the bits are the same on every processor. Few rows
// decode codes in registers; many rows share the decoded values of a block, which stay in the nearest cache.
//
// A code is sign, 4 bits of exponent with bias 7, and 3 bits of mantissa; 0x7f and 0xff are NaN, and there is no
// infinity. Moved by one exponent bit, it is a float16 of 2^-8 times its value. The conversion from float16 is exact
// for subnormals too, also where a thread flushes those of float32.

namespace pymoe::cpu::PYMOE_ISA {

// Of a code as float16: its magnitude, the magnitude that is NaN, and its sign.
inline constexpr int16_t kFp8Magnitude = 0x3f80, kFp8Nan = 0x3f80, kFp8Sign = INT16_MIN;

#if PYMOE_ISA_LEVEL == 4
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)_mm512_fmadd_ps(a, b, sum); }

// The values of the codes of two vectors of outputs.
PYMOE_INLINE void decode(const uint8_t* codes, vfloat* values) {
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(kFp8Magnitude));
  const __m512i finite = _mm512_or_si512(magnitude, _mm512_and_si512(wide, _mm512_set1_epi16(kFp8Sign)));
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(kFp8Nan));
  const __m512i halves = _mm512_mask_mov_epi16(finite, nan, _mm512_set1_epi16(0x7e00));
  values[0] = (vfloat)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * 256.0f;
  values[1] = (vfloat)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * 256.0f;
}
#elif PYMOE_ISA_LEVEL == 3
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)_mm256_fmadd_ps(a, b, sum); }

PYMOE_INLINE void decode(const uint8_t* codes, vfloat* values) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(kFp8Magnitude));
  const __m256i finite = _mm256_or_si256(magnitude, _mm256_and_si256(wide, _mm256_set1_epi16(kFp8Sign)));
  const __m256i halves =
      _mm256_or_si256(finite, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(kFp8Nan)));  // all ones are a NaN
  values[0] = (vfloat)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)) * 256.0f;
  values[1] = (vfloat)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) * 256.0f;
}
#else
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) {
  for (int lane = 0; lane < kLanes<float>; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
  return sum;
}

struct Fp8Values {
  float of[256];
  constexpr Fp8Values() : of() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float value = static_cast<float>(exponent == 0 ? mantissa : 8 + mantissa) / 512;  // times 2^(exponent - 1)
      for (int i = 1; i < exponent; ++i) value *= 2;
      of[code] = (code & 127) == 127 ? __builtin_nanf("") : code < 128 ? value : -value;
    }
  }
};

PYMOE_INLINE void decode(const uint8_t* codes, vfloat* values) {
  static constexpr Fp8Values kValues;
  for (int vector = 0; vector < 2; ++vector) {
    vfloat value{};
    for (int lane = 0; lane < kLanes<float>; ++lane) value[lane] = kValues.of[codes[vector * kLanes<float> + lane]];
    values[vector] = value;
  }
}
#endif

// Writes `count` <= 128 values in fp32; the values past them are zero.
template <typename T>
void widen_block(const T* x, int64_t count, int8_t* to, RoundedBlock&) {
  auto* values = reinterpret_cast<float*>(to);
  if (count < kRoundedInputs) memset(values, 0, static_cast<size_t>(kWidenedBytes));
  for_vectors<T>(count, [&](int64_t i, int size) { store_count(values + i, load_count(x + i, size), size); });
}

// The weights of some outputs for each input of a block: codes in the packed tile, or values that are decoded.
struct StoredCodes {
  const uint8_t* codes;
  template <int kVectors>
  PYMOE_INLINE void load_input(int64_t input, vfloat (&values)[kVectors]) const {
    constexpr int64_t kAhead = 8192;  // bytes
    const uint8_t* from = codes + input * kQuantizedTile;
    __builtin_prefetch(from + kAhead);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 2) decode(from + v * kLanes<float>, values + v);
  }
};

struct DecodedValues {
  const float* decoded;
  template <int kVectors>
  PYMOE_INLINE void load_input(int64_t input, vfloat (&values)[kVectors]) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) values[v] = load(decoded + (input * kVectors + v) * kLanes<float>);
  }
};

// y[r][outputs] += scales * the products of a block, for kRows rows whose values follow one another, and for the
// outputs of kVectors vectors. `y` and `scales` are those of the first output; a row of y has 64 outputs.
template <int kRows, int kVectors, typename Weights>
void multiply_fp8(Weights weights, const float* scales, int64_t inputs, const float* PYMOE_RESTRICT x,
                  float* PYMOE_RESTRICT y) {
  vfloat sums[kRows][kVectors] = {};
  for (int64_t input = 0; input < inputs; ++input) {
    vfloat values[kVectors];
    weights.load_input(input, values);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const vfloat factor = broadcast(x[r * kRoundedInputs + input]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fused_multiply_add(values[v], factor, sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* sum = y + r * kQuantizedTile + v * kLanes<float>;
      store(sum, load(sum) + sums[r][v] * load(scales + v * kLanes<float>));
    }
  }
}

template <typename Weights>
using MultiplyFp8 = void (*)(Weights, const float*, int64_t, const float*, float*);

// Returns the function for `rows` rows, 1 <= rows <= kMost.
template <int kMost, int kVectors, typename Weights>
MultiplyFp8<Weights> multiply_fp8_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr MultiplyFp8<Weights> functions[] = {&multiply_fp8<i + 1, kVectors, Weights>...};
    return functions[rows - 1];
  }(std::make_integer_sequence<int, kMost>{});
}

// The number of rows that decode in registers, of those that share decoded values, and of vectors beside each: as many
// sums as the registers hold. More rows than kMostDecoding share decoded values.
#if PYMOE_ISA_LEVEL == 4
inline constexpr int kMostDecoding = 6, kDecodingVectors = 4, kMostSharing = 12, kSharingVectors = 2;
#else
inline constexpr int kMostDecoding = 4, kDecodingVectors = 2, kMostSharing = 6, kSharingVectors = 2;
#endif

// multiply_tile of quantized_linear_cpu_body.h, for fp8.
template <typename T>
void multiply_tile_fp8(const uint8_t* tile, int64_t inputs, const RoundedRows& x, const T* bias, T* out,
                       int64_t row_stride, int64_t count) {
  constexpr int64_t kChunk = 96;  // number of rows whose sums stay in the nearest caches
  constexpr int kWidth = kLanes<float>;
  alignas(64) float y[kChunk * kQuantizedTile];
  alignas(64) float decoded[kFp8Block * kSharingVectors * kWidth];
  for (int64_t chunk = 0; chunk < x.count; chunk += kChunk) {
    const int64_t size = x.count - chunk < kChunk ? x.count - chunk : kChunk;
    memset(y, 0, static_cast<size_t>(size * kQuantizedTile) * sizeof(float));
    for (int64_t block = 0; block < fp8_blocks(inputs); ++block) {
      const int64_t rest = (quantized_groups(inputs) * kQuantizedGroup) - block * kFp8Block;
      const int64_t some = rest < kFp8Block ? rest : kFp8Block;
      const auto* scales = reinterpret_cast<const float*>(tile + fp8_block_begin(block));
      const uint8_t* codes = tile + fp8_block_begin(block) + kQuantizedTile * 4;
      const auto* values = reinterpret_cast<const float*>(x.codes + block * x.codes_stride + chunk * kWidenedBytes);
      if (size <= kMostDecoding) {
        const auto function = multiply_fp8_for<kMostDecoding, kDecodingVectors, StoredCodes>(size);
        for (int64_t first = 0; first < kQuantizedTile; first += kDecodingVectors * kWidth) {
          function(StoredCodes{codes + first}, scales + first, some, values, y + first);
        }
        continue;
      }
      const int64_t parts = (size + kMostSharing - 1) / kMostSharing;
      for (int64_t first = 0; first < kQuantizedTile; first += kSharingVectors * kWidth) {
        for (int64_t input = 0; input < some; ++input) {
          vfloat outputs[kSharingVectors];
          StoredCodes{codes + first}.load_input(input, outputs);
          for (int v = 0; v < kSharingVectors; ++v) store(decoded + (input * kSharingVectors + v) * kWidth, outputs[v]);
        }
        for (int64_t part = 0, r = 0; part < parts; ++part) {
          const int64_t together = (size - r) / (parts - part);  // so that parts are as equal as possible
          multiply_fp8_for<kMostSharing, kSharingVectors, DecodedValues>(together)(
              DecodedValues{decoded}, scales + first, some, values + r * kFp8Block, y + r * kQuantizedTile + first);
          r += together;
        }
      }
    }
    finish<WeightFormat::kFp8>(tile, y, size, bias, out + chunk * row_stride, row_stride, count);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
