// The loops of quantized_linear, compiled once per instruction set (see quantized_linear.h; no include guard on
// purpose).
//
// Outputs are spread over the 32-bit lanes of vectors, so that no sum over a whole vector is needed. If the processor
// multiplies bytes (AVX512_VNNI, FEAT_DotProd), an activation is two signed bytes, 256 * high + low, and four high or
// four low bytes are multiplied by four codes per lane. FEAT_I8MM multiplies the high and low bytes of eight
// activations by eight codes of two outputs. Otherwise, codes are widened to 16 bits and multiplied in pairs. AMX tiles
// multiply many rows (quantized_linear_amx.h). All of these give the same integers. quantized_linear_fused.h has the
// products with fp8, affine and symmetric formats, quantized_linear_decode.h the gradient.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr bool kMultipliesBytes = PYMOE_ISA_HAS_BF16 || PYMOE_ISA_HAS_DOTPROD || PYMOE_ISA_HAS_I8MM;
inline constexpr int kTileVectorsOfOutputs = static_cast<int>(kQuantizedTile) / kLanes<float>;

PYMOE_INLINE vfloat to_float(vint32 value) { return __builtin_convertvector(value, vfloat); }

PYMOE_INLINE vint32 load_integers(const int32_t* source) {
  vint32 integers;
  memcpy(&integers, source, sizeof(integers));
  return integers;
}

// --- activations ---

#if PYMOE_ISA_HAS_BF16
template <Integers kIntegers>
PYMOE_INLINE void lay_out(const int32_t* integers, int8_t* codes) {
  if constexpr (kIntegers == Integers::kForTiles4) {  // 256 * high, then low, as bf16 in the order of RightCodes
    alignas(64) static constexpr uint16_t kUpperHalves[32] = {1,  5,  3,  7,  9,  13, 11, 15, 17, 21, 19,
                                                              23, 25, 29, 27, 31, 33, 37, 35, 39, 41, 45,
                                                              43, 47, 49, 53, 51, 55, 57, 61, 59, 63};
    const __m512i order = _mm512_load_si512(kUpperHalves);
    for (int64_t i = 0; i < kRoundedInputs; i += 32) {
      const vint32 first = load_integers(integers + i), second = load_integers(integers + i + 16);
      const vint32 low = first << 24 >> 24, next_low = second << 24 >> 24;
      const auto as_bf16 = [&](vint32 a, vint32 b) {
        return _mm512_permutex2var_epi16((__m512i)to_float(a), order, (__m512i)to_float(b));
      };
      _mm512_storeu_si512(codes + 2 * i, as_bf16(first - low, second - next_low));
      _mm512_storeu_si512(codes + kRoundedBytes + 2 * i, as_bf16(low, next_low));
    }
  } else {  // 128 high bytes, then the low ones
    for (int64_t i = 0; i < kRoundedInputs; i += 16) {
      const vint32 some = load_integers(integers + i);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8((__m512i)((some + 128) >> 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + kRoundedInputs + i), _mm512_cvtepi32_epi8((__m512i)some));
    }
  }
}
#else
template <Integers kIntegers>
PYMOE_INLINE void lay_out(const int32_t* integers, int8_t* codes) {
#if PYMOE_ISA_HAS_I8MM
  if constexpr (kIntegers == Integers::kForVectors) {  // 8 high bytes, then their low ones
    for (int64_t i = 0; i < kRoundedInputs; i += 8) {
      const int16x8_t some = vcombine_s16(vmovn_s32(vld1q_s32(integers + i)), vmovn_s32(vld1q_s32(integers + i + 4)));
      vst1q_s8(codes + 2 * i, vcombine_s8(vrshrn_n_s16(some, 8), vmovn_s16(some)));
    }
    return;
  }
#endif
  constexpr bool kBytes = kIntegers == Integers::kForTiles8 || (kIntegers == Integers::kForVectors && kMultipliesBytes);
  constexpr int kOrder[4] = {0, 2, 1, 3};  // widened codes come in even and odd pairs
  for (int64_t quad = 0; quad < kRoundedInputs; quad += 4) {
    for (int64_t i = 0; i < 4; ++i) {
      const int32_t integer = integers[quad + (kBytes ? i : kOrder[i])];
      const auto low = static_cast<int8_t>(integer);
      if constexpr (kBytes) {
        codes[quad + i] = static_cast<int8_t>((integer - low) >> 8);
        codes[kRoundedInputs + quad + i] = low;
      } else if constexpr (kIntegers == Integers::kForVectors) {
        const auto both = static_cast<int16_t>(integer);
        memcpy(codes + 2 * (quad + i), &both, sizeof(both));
      } else {
        const BFloat16 both[2] = {round_to<BFloat16>(static_cast<float>(integer - low)),
                                  round_to<BFloat16>(static_cast<float>(low))};
        memcpy(codes + 2 * (quad + i), &both[0], sizeof(BFloat16));
        memcpy(codes + kRoundedBytes + 2 * (quad + i), &both[1], sizeof(BFloat16));
      }
    }
  }
}
#endif

// Reductions over lanes are written out, because generic ones would be most of a block's cost.
PYMOE_INLINE int32_t largest_lane(vint32 value) {
#if PYMOE_ISA_LEVEL == 4
  return _mm512_reduce_max_epi32((__m512i)value);
#elif PYMOE_NEON
  return vmaxvq_s32((int32x4_t)value);
#else
  int32_t largest = value[0];
  for (int lane = 1; lane < kLanes<float>; ++lane) largest = value[lane] > largest ? value[lane] : largest;
  return largest;
#endif
}

// Stores the sum over the lanes of each group in `rounded.sums`, and 128 times the total in `rounded.zero`.
PYMOE_INLINE void sum_groups(const vint32 (&groups)[4], RoundedBlock& rounded) {
#if PYMOE_ISA_LEVEL == 4
  const auto a = (__m512i)groups[0], b = (__m512i)groups[1], c = (__m512i)groups[2], d = (__m512i)groups[3];
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i parts = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(parts), _mm512_extracti64x4_epi64(parts, 1));
  const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  _mm_storeu_ps(rounded.sums, _mm_cvtepi32_ps(sums));
  const __m128i two = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
  rounded.zero = 128 * (_mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1));
#else
  rounded.zero = 0;
  for (int group = 0; group < 4; ++group) {
    const int32_t sum = sum_lanes(groups[group]);
    rounded.sums[group] = static_cast<float>(sum);
    rounded.zero += 128 * sum;
  }
#endif
}

// Rounds a block of `count` <= 128 values to integers. The other integers of the block are zero.
template <Integers kIntegers, typename T>
void round_block(const T* x, int64_t count, int8_t* codes, RoundedBlock& rounded) {
  alignas(64) float values[kRoundedInputs];
  alignas(64) int32_t integers[kRoundedInputs];
  if (count < kRoundedInputs) memset(values, 0, sizeof(values));
  vint32 largest = 0x0d800000 - vint32{};  // 2^-100
  for_vectors<T>(count, [&](int64_t first, int size) {
    const vfloat value = load_count(x + first, size);
    store(values + first, value);
    const vint32 magnitude = (vint32)value & 0x7fffffff;  // ordered like the values, with NaN and infinity above all
    largest = magnitude > largest ? magnitude : largest;
  });
  const int32_t bits = largest_lane(largest);
  if (bits >= 0x7f800000) {
    rounded = {};
    rounded.step = bit_cast<float>(0x7fc00000u);
    memset(codes, 0, kIntegers == Integers::kForTiles4 ? 2 * kRoundedBytes : kRoundedBytes);
    return;
  }
  int32_t exponent = (bits >> 23) - 14;
  if (bit_cast<float>(bits) > 32639.0f * bit_cast<float>(exponent << 23)) ++exponent;
  rounded.step = bit_cast<float>(exponent << 23);
  const float inverse = bit_cast<float>((254 - exponent) << 23);
  const vfloat magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vint32 sums[4] = {};
#pragma GCC unroll 4
  for (int64_t group = 0; group < 4; ++group) {
    for (int64_t i = group * kQuantizedGroup; i < (group + 1) * kQuantizedGroup; i += kLanes<float>) {
      const vint32 integer = (vint32)(load(values + i) * inverse + magic) - (vint32)magic;
      memcpy(integers + i, &integer, sizeof(integer));
      sums[group] += integer;
    }
  }
  sum_groups(sums, rounded);
  lay_out<kIntegers>(integers, codes);
}

// --- products ---

PYMOE_INLINE vint32 load_words(const uint8_t* source) {
  vint32 words;
  memcpy(&words, source, sizeof(words));
  return words;
}

PYMOE_INLINE vint32 broadcast_word(const int8_t* source) {
  int32_t word;
  memcpy(&word, source, sizeof(word));
  return word - vint32{};
}

// Returns 2 v + 12 for the value v of each mxfp4 code, one byte each. The 12 makes all results non-negative.
PYMOE_INLINE vint32 twice_plus_12(vint32 codes) {
#if PYMOE_ISA_LEVEL >= 3 || PYMOE_NEON
  alignas(16) static constexpr uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if PYMOE_NEON
  return (vint32)vqtbl1q_u8(vld1q_u8(kValues), (uint8x16_t)codes);
#else
  const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(kValues));
#endif
#if PYMOE_ISA_LEVEL == 4
  return (vint32)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif PYMOE_ISA_LEVEL == 3
  return (vint32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#endif
#else
  constexpr uint32_t kOnes = 0x01010101;
  const vuint32 bits = (vuint32)codes;
  const vuint32 one = bits & kOnes, two = (bits >> 1) & kOnes, four = (bits >> 2) & kOnes, sign = (bits >> 3) & kOnes;
  const vuint32 small = four ^ kOnes;  // values below 2, whose doubles are their codes
  const vuint32 twice =
      (small & one) | ((small & two) | (four & ~two & one)) << 1 | (four & (~two | one)) << 2 | (four & two) << 3;
  const vuint32 negative = twice & ((sign << 8) - sign);  // no byte of the sums below leaves 0 to 24
  return (vint32)(12 * kOnes + twice - (negative << 1));
#endif
}

PYMOE_INLINE vint32 load_bytes(const uint8_t* source) {
#if PYMOE_ISA_LEVEL == 4
  return (vint32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif PYMOE_ISA_LEVEL == 3
  return (vint32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#elif PYMOE_NEON
  uint32_t four;
  memcpy(&four, source, sizeof(four));
  return (vint32)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
  vint32 bytes;
  for (int lane = 0; lane < kLanes<float>; ++lane) bytes[lane] = source[lane];
  return bytes;
#endif
}

// Loads bytes in e8m0 (the scales of mxfp4, the powers of int4) as floats: powers of two, or NaN for 255.
PYMOE_INLINE vfloat load_powers(const uint8_t* source) {
  const vint32 exponent = load_bytes(source);
  // An exponent of 0 stands for 2^-127 (subnormal) and 255 for NaN: both need the mantissa's upper bit.
  const vint32 end = (((exponent + 1) & 0xff) < 2) & (1 << 22);
  return (vfloat)(exponent << 23 | end);
}

// The number of words of an output that are multiplied at once. A word has 4 codes (8 bits) or 8 codes (4 bits).
template <WeightFormat kFormat>
inline constexpr int kWordsTogether = PYMOE_ISA_HAS_I8MM && bits_of(kFormat) == 8 ? 2 : 1;

#if PYMOE_ISA_HAS_I8MM

inline constexpr bool kLess128 = false;

// Sums of two outputs in each vector: per output, the sum with the high bytes of activations, then with the low ones.
struct Sum {
  int32x4_t first{}, second{};
  PYMOE_INLINE vint32 value() const {
    constexpr int32x4_t kPlaces = {8, 0, 8, 0};
    return (vint32)vpaddq_s32(vshlq_s32(first, kPlaces), vshlq_s32(second, kPlaces));
  }
};

// Adds the products of 8 codes with the high and with the low bytes of 8 activations, for each of two outputs.
PYMOE_INLINE int32x4_t add_products(int32x4_t sum, uint8x16_t codes, int8x16_t x) {
  return vusmmlaq_s32(sum, codes, x);
}
PYMOE_INLINE int32x4_t add_products(int32x4_t sum, int8x16_t codes, int8x16_t x) { return vmmlaq_s32(sum, codes, x); }

// Eight codes of each of four outputs: of two outputs in `first`, and of two in `second`. In mxfp4, twice their values.
template <WeightFormat kFormat>
struct Codes {
  using Bytes = std::conditional_t<kFormat == WeightFormat::kMxfp4, int8x16_t, uint8x16_t>;
  Bytes first, second;
};

template <WeightFormat kFormat>
inline constexpr int kFactors = 1;

template <WeightFormat kFormat>
PYMOE_INLINE Codes<kFormat> factor(vint32 words, vint32 last, int) {
  using Bytes = typename Codes<kFormat>::Bytes;
  auto low = (uint8x16_t)words, high = (uint8x16_t)last;
  if constexpr (bits_of(kFormat) == 4) {
    low = vandq_u8(low, vdupq_n_u8(15));
    high = vshrq_n_u8(high, 4);
  }
  if constexpr (kFormat == WeightFormat::kMxfp4) {
    alignas(16) static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const auto table = (uint8x16_t)vld1q_s8(kTwice);
    low = vqtbl1q_u8(table, low);
    high = vqtbl1q_u8(table, high);
  }
  const auto a = (uint32x4_t)low, b = (uint32x4_t)high;
  return {(Bytes)vzip1q_u32(a, b), (Bytes)vzip2q_u32(a, b)};
}

template <int kRows, int kVectors, WeightFormat kFormat>
PYMOE_INLINE void multiply(const Codes<kFormat> (&codes)[kVectors], const int8_t* x, int64_t row_stride,
                           Sum (&sums)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int8x16_t bytes = vld1q_s8(x + r * row_stride);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v].first = add_products(sums[r][v].first, codes[v].first, bytes);
      sums[r][v].second = add_products(sums[r][v].second, codes[v].second, bytes);
    }
  }
}

#elif PYMOE_ISA_HAS_BF16 || PYMOE_ISA_HAS_DOTPROD

// Sums of codes times activations: 256 * high + low.
struct Sum {
  vint32 high{}, low{};
  PYMOE_INLINE void start_from(vint32 value) { low = value; }
  PYMOE_INLINE vint32 value() const { return (vint32)(((vuint32)high << 8) + (vuint32)low); }
};

// FEAT_DotProd multiplies signed bytes, so 128 is subtracted from 8-bit codes. 4-bit codes need no change.
inline constexpr bool kLess128 = PYMOE_ISA_HAS_DOTPROD;

// Adds to each lane the dot product of four bytes of `codes` (signed if kLess128) and the four signed bytes of `word`.
#if PYMOE_ISA_HAS_DOTPROD
PYMOE_INLINE int8x8_t load_word(const int8_t* source) {
  uint32_t word;
  memcpy(&word, source, sizeof(word));
  return vcreate_s8(word);
}
PYMOE_INLINE vint32 add_products(vint32 sum, vint32 codes, int8x8_t word) {
  return (vint32)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)codes, word, 0);
}
#else
PYMOE_INLINE vint32 load_word(const int8_t* source) { return broadcast_word(source); }
PYMOE_INLINE vint32 add_products(vint32 sum, vint32 codes, vint32 word) {
  return (vint32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)word);
}
#endif

// The number of factors of a word, one for every four codes; a factor is multiplied by 8 bytes of activations.
template <WeightFormat kFormat>
inline constexpr int kFactors = bits_of(kFormat) == 8 ? 1 : 2;

template <WeightFormat kFormat>
PYMOE_INLINE vint32 factor(vint32 words, vint32, int i) {
  if constexpr (kFormat == WeightFormat::kInt8) return kLess128 ? words ^ static_cast<int32_t>(0x80808080) : words;
#if PYMOE_ISA_HAS_DOTPROD
  const vint32 codes = i == 0 ? words & 0x0f0f0f0f : (vint32)vshrq_n_u8((uint8x16_t)words, 4);
#else
  const vint32 codes = (i == 0 ? words : (vint32)((vuint32)words >> 4)) & 0x0f0f0f0f;
#endif
  return kFormat == WeightFormat::kMxfp4 ? twice_plus_12(codes) : codes;
}

template <int kRows, int kVectors>
PYMOE_INLINE void multiply(const vint32 (&codes)[kVectors], const int8_t* x, int64_t row_stride,
                           Sum (&sums)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const auto high = load_word(x + r * row_stride), low = load_word(x + r * row_stride + kRoundedInputs);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v].high = add_products(sums[r][v].high, codes[v], high);
      sums[r][v].low = add_products(sums[r][v].low, codes[v], low);
    }
  }
}

#else

inline constexpr bool kLess128 = false;

#if PYMOE_NEON
// Sums of 16-bit products. Each output has two neighbouring lanes of `first` or `second`; value() adds the two.
struct Sum {
  int32x4_t first{}, second{};
  PYMOE_INLINE void start_from(vint32 value) {
    first = vzip1q_s32((int32x4_t)value, int32x4_t{});
    second = vzip2q_s32((int32x4_t)value, int32x4_t{});
  }
  PYMOE_INLINE vint32 value() const { return (vint32)vpaddq_s32(first, second); }
  PYMOE_INLINE void add_products(vint32 a, vint32 b) {
    first = vmlal_s16(first, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    second = vmlal_high_s16(second, (int16x8_t)a, (int16x8_t)b);
  }
};
#else
struct Sum {
  vint32 sum{};
  PYMOE_INLINE void start_from(vint32 value) { sum = value; }
  PYMOE_INLINE vint32 value() const { return sum; }
  // Adds two products of 16-bit integers to each lane.
  PYMOE_INLINE void add_products(vint32 a, vint32 b) {
#if PYMOE_ISA_LEVEL == 4
    sum += (vint32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif PYMOE_ISA_LEVEL == 3
    sum += (vint32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    asm("" : "+x"(sum));  // gcc 12 would add up the products of several steps first, which takes more registers
#elif PYMOE_MULTIVERSION
    sum += (vint32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    sum += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
  }
};
#endif

template <WeightFormat kFormat>
inline constexpr int kFactors = bits_of(kFormat) == 8 ? 2 : 4;

typedef uint16_t vuint16 __attribute__((vector_size(kVectorBytes)));

// Returns 16-bit codes in the order of the activations: inputs (0, 2), (1, 3) and, with 4 bits, (4, 6), (5, 7).
template <WeightFormat kFormat>
PYMOE_INLINE vint32 factor(vint32 words, vint32, int i) {
  if constexpr (kFormat == WeightFormat::kInt8) return (vint32)((vuint32)words >> (8 * i)) & 0x00ff00ff;
  if constexpr (kFormat == WeightFormat::kMxfp4) {
    const vint32 bytes = twice_plus_12((vint32)((vuint32)words >> (i / 2 * 4)) & 0x0f0f0f0f);
    return i % 2 == 0 ? bytes & 0x00ff00ff : (vint32)((vuint16)bytes >> 8);
  }
  return (vint32)((vuint32)words >> (i % 2 * 8 + i / 2 * 4)) & 0x000f000f;
}

template <int kRows, int kVectors>
PYMOE_INLINE void multiply(const vint32 (&codes)[kVectors], const int8_t* x, int64_t row_stride,
                           Sum (&sums)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const vint32 pair = broadcast_word(x + r * row_stride);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v].add_products(codes[v], pair);
  }
}

#endif

// The prefetch distance in bytes. With 4096 or 16384, products of two to eight rows take longer.
inline constexpr int64_t kAhead = 8192;

// Prefetches the memory kAhead bytes after what a pass loads at `word`: kVectors vectors of outputs, from vector number
// `vector` on. If the first pass prefetched the lines of all passes, memory would idle in the others.
template <int kVectors>
PYMOE_INLINE void prefetch_later(const uint8_t* word, int vector) {
  if (kVectors * kVectorBytes % 64 != 0 && vector * kVectorBytes % 64 != 0) return;  // an earlier pass does
#pragma GCC unroll 8
  for (int64_t line = 0; line < kVectors * kVectorBytes; line += 64) __builtin_prefetch(word + line + kAhead);
}

// The decoded scales and minima of an int4 super-block of 64 outputs: 64 scales per group, then 64 minima per group.
struct SuperEnds {
  static constexpr int64_t kMinima = kSuperGroups * kQuantizedTile;
  alignas(64) float values[2 * kMinima];
  const float* of_group(int64_t group) const { return values + group % kSuperGroups * kQuantizedTile; }
};

// Decodes the scales and minima of the super-block at `super`, where they precede the codes. Products are exact, unless
// the multiplication by 2^(power - 127) overflows or underflows.
inline void decode_ends(const uint8_t* powers, const uint8_t* super, SuperEnds& ends) {
  constexpr int kFields = 2 * static_cast<int>(kSuperGroups);
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    const vfloat power = load_powers(powers + first);
    const auto* factors = reinterpret_cast<const Float16*>(super) + first;
    const vfloat of_scales = load(factors) * power, of_minima = -(load(factors + kQuantizedTile) * power);
    vuint32 words[3];
    for (int64_t i = first * 16; i < (first + kLanes<float>)*16; i += 64) __builtin_prefetch(super + i + kAhead);
    for (int i = 0; i < 3; ++i) words[i] = (vuint32)load_words(super + (4 + 4 * i) * kQuantizedTile + 4 * first);
#pragma GCC unroll 16
    for (int i = 0; i < kFields; ++i) {
      const int word = 6 * i / 32, shift = 6 * i % 32;
      vuint32 field = words[word] >> shift;
      if (shift > 26) field |= words[word + 1] << (32 - shift);
      const vfloat factor = i < kSuperGroups ? of_scales : of_minima;
      store(ends.values + i * kQuantizedTile + first, to_float((vint32)(field & 63)) * factor);
    }
  }
}

// Loads the scales of one group of inputs, in a 4-bit format, for the outputs from `output` on. For mxfp4, `scales`
// points to the group's bytes; for int4, `ends` is the result of SuperEnds::of_group.
template <WeightFormat kFormat>
PYMOE_INLINE vfloat load_scales(const uint8_t* scales, const float* ends, int64_t output) {
  return kFormat == WeightFormat::kMxfp4 ? load_powers(scales + output) : load(ends + output);
}

// Returns the factor of a block's scaled sums: the step, or half of it in mxfp4 (sums of twice the weights).
template <WeightFormat kFormat>
PYMOE_INLINE float step_of(const RoundedBlock& rounded) {
  return kFormat == WeightFormat::kMxfp4 ? rounded.step * 0.5f : rounded.step;
}

// Bytes of a row in one multiplication: 4 high or 4 low bytes, 2 whole integers or, with FEAT_I8MM, 8 whole integers.
inline constexpr int64_t kFactorBytes = PYMOE_ISA_HAS_I8MM ? 16 : 4;

// The registers for sums (with 4 bits, also for scaled sums) limit kMostRows, the number of rows that are multiplied
// together, and vectors_beside(rows), the vectors of outputs beside them. Four vectors need fewer loads per product.
#if PYMOE_ISA_LEVEL == 4
template <WeightFormat kFormat>
inline constexpr int kMostRows = bits_of(kFormat) == 8 ? (PYMOE_ISA_HAS_BF16 ? 3 : 5) : 4;
template <WeightFormat kFormat>
constexpr int vectors_beside(int rows) {
  return bits_of(kFormat) == 8 || rows == 1 ? 4 : 2;
}
#elif PYMOE_ISA_HAS_I8MM
template <WeightFormat kFormat>
inline constexpr int kMostRows = bits_of(kFormat) == 8 ? 5 : 6;  // gcc 12 would keep more in memory
template <WeightFormat kFormat>
constexpr int vectors_beside(int rows) {
  return rows == 1 ? 4 : bits_of(kFormat) == 8 || rows < 4 ? 2 : 1;
}
#else
template <WeightFormat kFormat>
inline constexpr int kMostRows = bits_of(kFormat) == 8 || PYMOE_NEON || PYMOE_ISA_LEVEL == 3 ? 4 : 2;
template <WeightFormat kFormat>
constexpr int vectors_beside(int rows) {
  return rows == 1 ? 4 : 2;
}
#endif

// With AVX2, more than kMostWidening rows share the codes of a block, widened once to factors of 16 bits, which stay in
// the nearest cache. Widening them anew for every few rows would take up to a third of the instructions.
inline constexpr bool kSharesCodes = PYMOE_ISA_LEVEL == 3;
template <WeightFormat kFormat>
inline constexpr int64_t kMostWidening = bits_of(kFormat) == 8 ? 20 : 12;
inline constexpr int kVectorsSharing = 2;
inline constexpr int64_t kSharedBytes = kSharesCodes ? 2 * kRoundedInputs * kQuantizedTile : 1;

// Writes the factors of a block's codes to `shared`. For every two vectors of outputs, the factors of all words follow
// in the order of the inputs.
template <WeightFormat kFormat>
void widen_codes(const uint8_t* weight, int64_t groups, uint8_t* PYMOE_RESTRICT shared) {
  constexpr int64_t kWordBytes = kQuantizedTile * 4, kWords = bits_of(kFormat);
  for (int vector = 0; vector < kTileVectorsOfOutputs; vector += kVectorsSharing) {
    const uint8_t* word = weight + quantized_ends_bytes(kFormat) + vector * kVectorBytes;
    for (int64_t group = 0; group < groups; ++group, word += quantized_ends_bytes(kFormat)) {
      for (int64_t i = 0; i < kWords; ++i, word += kWordBytes) {
        vint32 words[kVectorsSharing];
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsSharing; ++v) words[v] = load_words(word + v * kVectorBytes);
        prefetch_later<kVectorsSharing>(word, vector);
#pragma GCC unroll 4
        for (int f = 0; f < kFactors<kFormat>; ++f) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectorsSharing; ++v, shared += kVectorBytes) {
            const vint32 codes = factor<kFormat>(words[v], words[v], f);
            memcpy(shared, &codes, sizeof(codes));
          }
        }
      }
    }
  }
}

// Adds the products of a block, `groups` <= 4 groups of 32 inputs, to y, (kRows, 64). `weight` is the block's first
// group in a tile, `shared` its codes after widen_codes (if kShared), `ends` its scales and minima (int4); `x` and
// `rounded` are the block of the first row.
template <WeightFormat kFormat, bool kShared, int kRows>
void multiply_block(const uint8_t* PYMOE_RESTRICT weight, const uint8_t* PYMOE_RESTRICT shared,
                    const float* PYMOE_RESTRICT ends, int64_t groups, const int8_t* PYMOE_RESTRICT x,
                    const RoundedBlock* PYMOE_RESTRICT rounded, float* PYMOE_RESTRICT y) {
  constexpr int kVectors = kShared ? kVectorsSharing : vectors_beside<kFormat>(kRows), kWidth = kLanes<float>;
  constexpr int kTogether = kWordsTogether<kFormat>;
  constexpr int64_t kWordBytes = kShared ? kFactors<kFormat> * kVectors * kVectorBytes : kQuantizedTile * 4;
  constexpr int64_t kEnds = quantized_ends_bytes(kFormat);
  constexpr int64_t kWords = bits_of(kFormat);                          // of a group
  const int64_t sums_of = kFormat == WeightFormat::kInt8 ? groups : 1;  // groups that are added up as integers
  for (int vector = 0; vector < kTileVectorsOfOutputs; vector += kVectors) {
    const uint8_t* from =
        kShared ? shared + vector / kVectors * groups * kWords * kWordBytes : weight + kEnds + vector * kVectorBytes;
    const int8_t* activations = x;
    vfloat total[kRows][kVectors] = {};
    for (int64_t group = 0; group < groups; group += sums_of) {
      Sum sums[kRows][kVectors];
#if !PYMOE_ISA_HAS_I8MM  // which multiplies values with their signs
      if constexpr (kFormat == WeightFormat::kMxfp4) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const vint32 less_12 = __builtin_convertvector(broadcast(-12.0f * rounded[r].sums[group]), vint32);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sums[r][v].start_from(less_12);
        }
      }
#endif
      const uint8_t* word = from;
      for (int64_t i = 0; i < sums_of * kWords; i += kTogether) {
        vint32 words[kTogether][kVectors];
        if constexpr (!kShared) {
#pragma GCC unroll 2
          for (int w = 0; w < kTogether; ++w) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) words[w][v] = load_words(word + w * kWordBytes + v * kVectorBytes);
            prefetch_later<kVectors>(word + w * kWordBytes, vector);
          }
        }
#pragma GCC unroll 4
        for (int f = 0; f < kFactors<kFormat>; ++f) {
          decltype(factor<kFormat>(words[0][0], words[0][0], f)) codes[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            if constexpr (kShared) {
              codes[v] = load_words(word + (f * kVectors + v) * kVectorBytes);
            } else {
              codes[v] = factor<kFormat>(words[0][v], words[kTogether - 1][v], f);
            }
          }
          multiply<kRows, kVectors>(codes, activations + f * kFactorBytes, kRoundedBytes, sums);
        }
        word += kTogether * kWordBytes;
        activations += kFactors<kFormat> * kFactorBytes;
      }
      if constexpr (kFormat == WeightFormat::kInt8) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            total[r][v] = to_float(sums[r][v].value() - (kLess128 ? 0 : rounded[r].zero));
          }
        }
      } else {
        const uint8_t* scales = weight + group * quantized_group_bytes(kFormat);
        const float* its_ends = ends + group * kQuantizedTile;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const vfloat scale = load_scales<kFormat>(scales, its_ends, (vector + v) * kWidth);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) total[r][v] = total[r][v] + to_float(sums[r][v].value()) * scale;
          if constexpr (kFormat == WeightFormat::kInt4) {
            const vfloat minimum = load(its_ends + SuperEnds::kMinima + (vector + v) * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) total[r][v] = total[r][v] + rounded[r].sums[group] * minimum;
          }
        }
      }
      from += sums_of * (kShared ? kWords * kWordBytes : quantized_group_bytes(kFormat));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* sum = y + r * kQuantizedTile + (vector + v) * kWidth;
        store(sum, load(sum) + total[r][v] * step_of<kFormat>(rounded[r]));
      }
    }
  }
}

using MultiplyBlock = void (*)(const uint8_t*, const uint8_t*, const float*, int64_t, const int8_t*,
                               const RoundedBlock*, float*);

// Returns the function for `rows` rows, 1 <= rows <= kMostRows.
template <WeightFormat kFormat, bool kShared>
MultiplyBlock multiply_block_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr MultiplyBlock functions[] = {&multiply_block<kFormat, kShared, i + 1>...};
    return functions[rows - 1];
  }(std::make_integer_sequence<int, kMostRows<kFormat>>{});
}

// Stores y[r][j] in out[r * row_stride + j] for j < count: scaled (int8), with the bias added, and rounded.
template <WeightFormat kFormat, typename T>
PYMOE_INLINE void finish(const uint8_t* tile, const float* y, int64_t rows, const T* bias, T* out, int64_t row_stride,
                         int64_t count) {
  const auto* scales = reinterpret_cast<const float*>(tile);
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors<T>(count, [&](int64_t j, int size) {
      vfloat value = load(y + r * kQuantizedTile + j);
      if constexpr (kFormat == WeightFormat::kInt8) value = value * load(scales + j);
      if (bias != nullptr) value = value + load_count(bias + j, size);
      store_count(out + r * row_stride + j, value, size);
    });
  }
}

// Computes the first `count` <= 64 outputs of one tile for rows of one expert. `bias` may be null.
template <WeightFormat kFormat, typename T>
void multiply_tile(const uint8_t* tile, int64_t inputs, const RoundedRows& x, const T* bias, T* out, int64_t row_stride,
                   int64_t count) {
  constexpr int64_t kChunk = 96;  // number of rows whose sums and activations of a block stay in the nearest caches
  constexpr int64_t kBlockGroups = kRoundedInputs / kQuantizedGroup;
  const int64_t groups = quantized_groups(inputs);
  alignas(64) float y[kChunk * kQuantizedTile];
  alignas(64) uint8_t shared[kSharedBytes];
  SuperEnds ends;  // of int4
  for (int64_t chunk = 0; chunk < x.count; chunk += kChunk) {
    const int64_t size = x.count - chunk < kChunk ? x.count - chunk : kChunk;
    const int64_t parts = (size + kMostRows<kFormat> - 1) / kMostRows<kFormat>;
    const bool shares = kSharesCodes && size > kMostWidening<kFormat>;
    memset(y, 0, static_cast<size_t>(size * kQuantizedTile) * sizeof(float));
    const uint8_t* weight = tile + quantized_head_bytes(kFormat);
    for (int64_t group = 0; group < groups; group += kBlockGroups) {
      if (kFormat == WeightFormat::kInt4 && group % kSuperGroups == 0) {
        decode_ends(tile, weight, ends);
        weight += quantized_super_bytes(kFormat);
      }
      const int64_t block = group / kBlockGroups;
      const int8_t* codes = x.codes + block * x.codes_stride + chunk * kRoundedBytes;
      const RoundedBlock* rounded = x.rounded + block * x.rounded_stride + chunk;
      const int64_t some = groups - group < kBlockGroups ? groups - group : kBlockGroups;
      if constexpr (kSharesCodes) {
        if (shares) widen_codes<kFormat>(weight, some, shared);
      }
      for (int64_t part = 0, r = 0; part < parts; ++part) {
        const int64_t together = (size - r) / (parts - part);  // so that parts are as equal as possible
        const auto multiply =
            shares ? multiply_block_for<kFormat, kSharesCodes>(together) : multiply_block_for<kFormat, false>(together);
        multiply(weight, shared, ends.of_group(group), some, codes + r * kRoundedBytes, rounded + r,
                 y + r * kQuantizedTile);
        r += together;
      }
      weight += some * quantized_group_bytes(kFormat);
    }
    finish<kFormat>(tile, y, size, bias, out + chunk * row_stride, row_stride, count);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA

// clang-format off: each file depends on those before it
#include "kernels/quantized_linear_fused.h"
#include "kernels/quantized_linear_decode.h"
// clang-format on
#if PYMOE_ISA_HAS_BF16
#include "kernels/quantized_linear_amx.h"
#endif
