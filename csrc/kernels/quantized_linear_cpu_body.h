// The loops of quantized_linear, compiled once an instruction set (see quantized_linear.h; no include guard on
// purpose).
//
// A vector holds a code, or a sum, of as many outputs as it has lanes of 32 bits: sums never run over lanes. Where the
// processor multiplies bytes (AVX512_VNNI), an activation is two signed bytes, 256 * high + low, which are multiplied
// one after the other with four codes a lane; elsewhere codes are widened to 16 bits and multiplied in pairs. The
// integers are the same.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr int kTileVectorsOfOutputs = static_cast<int>(kQuantizedTile) / kLanes<float>;

// --- activations ---

// Of a block of 128 inputs, `integers`: for every 4 inputs 8 bytes, which a step of the product takes as two words.
PYMOE_INLINE void lay_out(const int32_t* integers, int8_t* codes) {
#if PYMOE_ISA_HAS_BF16
  for (int64_t quad = 0; quad < kRoundedInputs; quad += 4) {
    for (int64_t i = 0; i < 4; ++i) {
      const auto low = static_cast<int8_t>(integers[quad + i]);
      codes[2 * quad + i] = static_cast<int8_t>((integers[quad + i] - low) >> 8);
      codes[2 * quad + 4 + i] = low;
    }
  }
#else
  constexpr int kOrder[4] = {0, 2, 1, 3};  // widened codes come in even and odd pairs
  for (int64_t quad = 0; quad < kRoundedInputs; quad += 4) {
    int16_t four[4];
    for (int64_t i = 0; i < 4; ++i) four[i] = static_cast<int16_t>(integers[quad + kOrder[i]]);
    memcpy(codes + 2 * quad, four, sizeof(four));
  }
#endif
}

// Rounds `count` <= 128 values; the integers past them are zero.
template <typename T>
void round_block(const T* x, int64_t count, int8_t* codes, RoundedBlock& rounded) {
  alignas(64) float values[kRoundedInputs] = {};
  alignas(64) int32_t integers[kRoundedInputs] = {};
  vint32 largest{};
  for_vectors<T>(count, [&](int64_t first, int size) {
    const vfloat value = load_count(x + first, size);
    store(values + first, value);
    const vint32 magnitude = (vint32)value & 0x7fffffff;  // ordered as the values are, NaN and infinity above all
    largest = magnitude > largest ? magnitude : largest;
  });
  int32_t bits = 0x0d800000;  // 2^-100
  for (int lane = 0; lane < kLanes<float>; ++lane) bits = largest[lane] > bits ? largest[lane] : bits;
  rounded = {};
  if (bits >= 0x7f800000) {
    rounded.step = bit_cast<float>(0x7fc00000u);
    memset(codes, 0, kRoundedBytes);
    return;
  }
  int32_t exponent = (bits >> 23) - 14;
  if (bit_cast<float>(bits) > 32639.0f * bit_cast<float>(exponent << 23)) ++exponent;
  rounded.step = bit_cast<float>(exponent << 23);
  const float inverse = bit_cast<float>((254 - exponent) << 23);
  const vfloat magic = broadcast(12582912.0f);  // 1.5 * 2^23, beside which only integers fit
  for (int64_t i = 0; i < kRoundedInputs; i += kLanes<float>) {
    const vint32 integer = (vint32)(load(values + i) * inverse + magic) - (vint32)magic;
    memcpy(integers + i, &integer, sizeof(integer));
  }
  for (int64_t group = 0; group < 4; ++group) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kQuantizedGroup; ++i) sum += integers[group * kQuantizedGroup + i];
    rounded.sums[group] = static_cast<float>(sum);
    rounded.zero += 128 * sum;
  }
  lay_out(integers, codes);
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

PYMOE_INLINE vfloat to_float(vint32 value) { return __builtin_convertvector(value, vfloat); }

#if PYMOE_ISA_HAS_BF16

// Sums of codes times activations: 256 * high + low.
struct Sum {
  vint32 high{}, low{};
  PYMOE_INLINE vint32 value() const { return (vint32)(((vuint32)high << 8) + (vuint32)low); }
};

// What a word of 4 codes (8 bits) or 8 codes (4 bits) is multiplied as: a vector for every 8 bytes of activations.
template <int kBits>
inline constexpr int kFactors = kBits == 8 ? 1 : 2;

template <int kBits>
PYMOE_INLINE vint32 factor(vint32 words, int i) {
  if constexpr (kBits == 8) return words;
  return (i == 0 ? words : (vint32)((vuint32)words >> 4)) & 0x0f0f0f0f;
}

template <int kRows, int kVectors>
PYMOE_INLINE void multiply(const vint32 (&codes)[kVectors], const int8_t* x, int64_t row_stride,
                           Sum (&sums)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const vint32 high = broadcast_word(x + r * row_stride), low = broadcast_word(x + r * row_stride + 4);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v].high = (vint32)_mm512_dpbusd_epi32((__m512i)sums[r][v].high, (__m512i)codes[v], (__m512i)high);
      sums[r][v].low = (vint32)_mm512_dpbusd_epi32((__m512i)sums[r][v].low, (__m512i)codes[v], (__m512i)low);
    }
  }
}

inline constexpr int64_t kFactorBytes = 8;

#else

struct Sum {
  vint32 sum{};
  PYMOE_INLINE vint32 value() const { return sum; }
};

template <int kBits>
inline constexpr int kFactors = kBits == 8 ? 2 : 4;

// In the order of the activations: inputs 0 and 2, inputs 1 and 3, and of the upper halves 4 and 6, 5 and 7.
template <int kBits>
PYMOE_INLINE vint32 factor(vint32 words, int i) {
  if constexpr (kBits == 8) return (vint32)((vuint32)words >> (8 * i)) & 0x00ff00ff;
  return (vint32)((vuint32)words >> (i % 2 * 8 + i / 2 * 4)) & 0x000f000f;
}

// Sums of two products of 16 bits each.
PYMOE_INLINE vint32 multiply_pairs(vint32 a, vint32 b) {
#if PYMOE_ISA_LEVEL == 4
  return (vint32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif PYMOE_ISA_LEVEL == 3
  return (vint32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif PYMOE_MULTIVERSION
  return (vint32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

template <int kRows, int kVectors>
PYMOE_INLINE void multiply(const vint32 (&codes)[kVectors], const int8_t* x, int64_t row_stride,
                           Sum (&sums)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const vint32 pair = broadcast_word(x + r * row_stride);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v].sum += multiply_pairs(codes[v], pair);
  }
}

inline constexpr int64_t kFactorBytes = 4;

#endif

// The rows that go through registers together, and how many vectors of outputs beside them: as many as the registers
// hold, which with 4 bits also hold the scaled sums. Four vectors read whole words, and load less for each product.
#if PYMOE_ISA_LEVEL == 4
template <int kBits>
inline constexpr int kMostRows = kBits == 8 ? (PYMOE_ISA_HAS_BF16 ? 3 : 5) : 4;
template <int kBits>
constexpr int vectors_beside(int rows) {
  return kBits == 8 || rows == 1 ? 4 : 2;
}
#else
template <int kBits>
inline constexpr int kMostRows = kBits == 8 ? 4 : 2;
template <int kBits>
constexpr int vectors_beside(int rows) {
  return rows == 1 ? 4 : 2;
}
#endif

// y[r][outputs] += the products of a block: `groups` <= 4 groups of 32 inputs. `weight` is the block's first group in a
// tile, `x` and `rounded` are the block of the first of kRows rows, `y` is (kRows, 64).
template <int kBits, int kRows>
void multiply_block(const uint8_t* PYMOE_RESTRICT weight, int64_t groups, const int8_t* PYMOE_RESTRICT x,
                    const RoundedBlock* PYMOE_RESTRICT rounded, float* PYMOE_RESTRICT y) {
  constexpr int kVectors = vectors_beside<kBits>(kRows), kWidth = kLanes<float>;
  constexpr int64_t kWordBytes = kQuantizedTile * 4;
  constexpr int64_t kAhead = 8192;  // bytes: with 4096 and with 16384 two to eight rows take longer
  constexpr int64_t kEnds = kBits == 8 ? 0 : kQuantizedTile * 4;  // scales and minima of a group
  constexpr int64_t kWords = kBits == 8 ? 8 : 4;                  // of a group
  const int64_t sums_of = kBits == 8 ? groups : 1;                // groups that are added up as integers
  for (int vector = 0; vector < kTileVectorsOfOutputs; vector += kVectors) {
    const uint8_t* from = weight + vector * kVectorBytes;
    const int8_t* activations = x;
    vfloat total[kRows][kVectors] = {};
    for (int64_t group = 0; group < groups; group += sums_of) {
      Sum sums[kRows][kVectors];
      const uint8_t* word = from + kEnds;
      for (int64_t i = 0; i < sums_of * kWords; ++i) {
        vint32 words[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) words[v] = load_words(word + v * kVectorBytes);
        if (vector == 0) {
#pragma GCC unroll 8
          for (int64_t line = 0; line < kWordBytes; line += 64) __builtin_prefetch(word + line + kAhead);
        }
#pragma GCC unroll 4
        for (int f = 0; f < kFactors<kBits>; ++f) {
          vint32 codes[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) codes[v] = factor<kBits>(words[v], f);
          multiply<kRows, kVectors>(codes, activations + f * kFactorBytes, kRoundedBytes, sums);
        }
        word += kWordBytes;
        activations += kFactors<kBits> * kFactorBytes;
      }
      if constexpr (kBits == 8) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) total[r][v] = to_float(sums[r][v].value() - rounded[r].zero);
        }
      } else {
        const auto* scales = reinterpret_cast<const BFloat16*>(weight + group * quantized_group_bytes(4));
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const vfloat scale = load(scales + (vector + v) * kWidth);
          const vfloat minimum = load(scales + kQuantizedTile + (vector + v) * kWidth);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            total[r][v] = total[r][v] + to_float(sums[r][v].value()) * scale;
            total[r][v] = total[r][v] + rounded[r].sums[group] * minimum;
          }
        }
      }
      from += sums_of * quantized_group_bytes(kBits);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* sum = y + r * kQuantizedTile + (vector + v) * kWidth;
        store(sum, load(sum) + total[r][v] * rounded[r].step);
      }
    }
  }
}

template <int kBits>
using MultiplyBlock = void (*)(const uint8_t*, int64_t, const int8_t*, const RoundedBlock*, float*);

// The function for `rows` rows, 1 <= rows <= kMostRows.
template <int kBits>
MultiplyBlock<kBits> multiply_block_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr MultiplyBlock<kBits> functions[] = {&multiply_block<kBits, i + 1>...};
    return functions[rows - 1];
  }(std::make_integer_sequence<int, kMostRows<kBits>>{});
}

// out[r][first + j] = y[r][j], scaled (8 bits), with the bias added, and rounded; j < count.
template <int kBits, typename T>
PYMOE_INLINE void finish(const uint8_t* tile, const float* y, int64_t rows, const T* bias, T* out, int64_t row_stride,
                         int64_t count) {
  const auto* scales = reinterpret_cast<const float*>(tile);
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors<T>(count, [&](int64_t j, int size) {
      vfloat value = load(y + r * kQuantizedTile + j);
      if constexpr (kBits == 8) value = value * load(scales + j);
      if (bias != nullptr) value = value + load_count(bias + j, size);
      store_count(out + r * row_stride + j, value, size);
    });
  }
}

// `rows` rows of one expert times one tile of its outputs. Blocks of rows are `block_stride` rows apart.
template <int kBits, typename T>
void multiply_tile(const uint8_t* tile, int64_t inputs, const int8_t* codes, const RoundedBlock* rounded, int64_t rows,
                   int64_t block_stride, const T* bias, T* out, int64_t row_stride, int64_t count) {
  constexpr int64_t kChunk = 96;  // rows whose sums and activations of a block stay in the nearest caches
  constexpr int64_t kBlockGroups = kRoundedInputs / kQuantizedGroup;
  const int64_t groups = quantized_groups(inputs);
  alignas(64) float y[kChunk * kQuantizedTile];
  for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
    const int64_t size = rows - chunk < kChunk ? rows - chunk : kChunk;
    const int64_t parts = (size + kMostRows<kBits> - 1) / kMostRows<kBits>;
    memset(y, 0, static_cast<size_t>(size * kQuantizedTile) * sizeof(float));
    const uint8_t* weight = tile + quantized_head_bytes(kBits);
    for (int64_t group = 0; group < groups; group += kBlockGroups) {
      const int64_t first = group / kBlockGroups * block_stride + chunk;
      const int64_t some = groups - group < kBlockGroups ? groups - group : kBlockGroups;
      for (int64_t part = 0, r = 0; part < parts; ++part) {
        const int64_t together = (size - r) / (parts - part);  // parts of equal size, as far as that goes
        multiply_block_for<kBits>(together)(weight, some, codes + (first + r) * kRoundedBytes, rounded + first + r,
                                            y + r * kQuantizedTile);
        r += together;
      }
      weight += some * quantized_group_bytes(kBits);
    }
    finish<kBits>(tile, y, size, bias, out + chunk * row_stride, row_stride, count);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
