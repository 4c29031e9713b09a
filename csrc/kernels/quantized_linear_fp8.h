// The products of quantized_linear with weights in fp8 (see quantized_linear.h; no include guard on purpose).
//
// A vector holds the values of the codes of as many outputs as it has lanes. The sum of a block of 128 inputs starts
// from zero and takes one fused multiply-add per input, in the order of the inputs; then y += sum * scale, with both
// steps rounded. These are IEEE operations on single lanes, so the bits are the same on every processor. Few rows
// decode codes in registers; many rows share the decoded values of a block, which stay in the nearest cache.
//
// A code is a sign, 4 bits of exponent with bias 7, and 3 bits of mantissa; 0x7f and 0xff are NaN, and there is no
// infinity. With its exponent and mantissa at the lower ends of those of an fp32, it is 2^-120 times its value, so that
// a product with 2^120 gives the value, also of a subnormal code. These codes are subnormal as fp32, so the caller
// turns off the flushing of subnormals. A NaN is found on the side, as one makes the sum of its block NaN for every
// row.

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)_mm512_fmadd_ps(a, b, sum); }
#elif PYMOE_ISA_LEVEL == 3
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)_mm256_fmadd_ps(a, b, sum); }
#else
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) {
  for (int lane = 0; lane < kLanes<float>; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
  return sum;
}
#endif

PYMOE_INLINE vint32 load_signed_bytes(const uint8_t* source) {
#if PYMOE_ISA_LEVEL == 4
  return (vint32)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif PYMOE_ISA_LEVEL == 3
  return (vint32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
  vint32 bytes{};
  for (int lane = 0; lane < kLanes<float>; ++lane) bytes[lane] = static_cast<int8_t>(source[lane]);
  return bytes;
#endif
}

// The values of a vector's codes; NaN appears as 480.
PYMOE_INLINE vfloat decode(const uint8_t* codes) {
  constexpr auto kBits = static_cast<int32_t>(0x87f00000u);  // the sign, and where exponent and mantissa are
  return (vfloat)(load_signed_bytes(codes) << 20 & kBits) * 0x1p120f;
}

typedef uint8_t vcodes __attribute__((vector_size(2 * kLanes<float>)));  // the codes of two vectors of outputs

// Looks for NaN among the codes of some inputs, for the outputs of kVectors vectors.
template <int kVectors>
class NanAmong {
 public:
  PYMOE_INLINE void see(const uint8_t* codes) {
#pragma GCC unroll 2
    for (int i = 0; i < kVectors / 2; ++i) {
      vcodes some;
      memcpy(&some, codes + i * static_cast<int>(sizeof(some)), sizeof(some));
      some &= 0x7f;
      largest_[i] = some > largest_[i] ? some : largest_[i];
    }
  }
  // A vector whose bits are ones, which is NaN, in the lanes of outputs that have one, and zeros in the others.
  PYMOE_INLINE vint32 lanes(int vector) const {
    uint8_t bytes[sizeof(largest_)];
    memcpy(bytes, largest_, sizeof(bytes));
    return load_signed_bytes(bytes + vector * kLanes<float>) == 0x7f;
  }

 private:
  vcodes largest_[kVectors / 2] = {};
};

// Writes `count` <= 128 values in fp32; the values past them are zero.
template <typename T>
void widen_block(const T* x, int64_t count, int8_t* to, RoundedBlock&) {
  auto* values = reinterpret_cast<float*>(to);
  if (count < kRoundedInputs) memset(values, 0, static_cast<size_t>(kWidenedBytes));
  for_vectors<T>(count, [&](int64_t i, int size) { store_count(values + i, load_count(x + i, size), size); });
}

// The weights of the outputs of kVectors vectors, for each input of a block: codes in the packed tile, or values.
template <int kVectors>
struct StoredCodes {
  const uint8_t* codes;
  NanAmong<kVectors> nan{};

  PYMOE_INLINE void load_input(int64_t input, vfloat (&values)[kVectors]) {
    constexpr int64_t kAhead = 8192;  // bytes
    const uint8_t* from = codes + input * kQuantizedTile;
    __builtin_prefetch(from + kAhead);
    nan.see(from);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) values[v] = decode(from + v * kLanes<float>);
  }
  PYMOE_INLINE vfloat with_nan(vfloat sum, int vector) const { return (vfloat)((vint32)sum | nan.lanes(vector)); }
};

template <int kVectors>
struct DecodedValues {
  const float* decoded;

  PYMOE_INLINE void load_input(int64_t input, vfloat (&values)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) values[v] = load(decoded + (input * kVectors + v) * kLanes<float>);
  }
  PYMOE_INLINE vfloat with_nan(vfloat sum, int) const { return sum; }
};

// Decodes the codes of a block for DecodedValues. NaN goes to the first input, and thus into every sum.
template <int kVectors>
void decode_block(StoredCodes<kVectors> stored, int64_t inputs, float* decoded) {
  for (int64_t input = 0; input < inputs; ++input) {
    vfloat values[kVectors];
    stored.load_input(input, values);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(decoded + (input * kVectors + v) * kLanes<float>, values[v]);
  }
  for (int v = 0; v < kVectors; ++v) {
    float* first = decoded + v * kLanes<float>;
    store(first, stored.with_nan(load(first), v));
  }
}

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
      store(sum, load(sum) + weights.with_nan(sums[r][v], v) * load(scales + v * kLanes<float>));
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

// The numbers of rows that decode in registers, beside four vectors of outputs or beside fewer, and of those that share
// decoded values: as many sums as the registers hold, and enough that they need not wait for each other. More rows than
// kMostDecoding share decoded values.
#if PYMOE_ISA_LEVEL == 4
inline constexpr int kMostBesideFour = 6, kMostDecoding = 6, kDecodingVectors = 4, kMostSharing = 12;
#else
inline constexpr int kMostBesideFour = 1, kMostDecoding = 4, kDecodingVectors = 2, kMostSharing = 6;
#endif
inline constexpr int kSharingVectors = 2;

// y += the products of a block for `rows` <= kMost rows, which decode in registers.
template <int kMost, int kVectors>
void multiply_few_fp8(const uint8_t* codes, const float* scales, int64_t inputs, const float* x, int64_t rows,
                      float* y) {
  const auto function = multiply_fp8_for<kMost, kVectors, StoredCodes<kVectors>>(rows);
  for (int64_t first = 0; first < kQuantizedTile; first += kVectors * kLanes<float>) {
    function({codes + first}, scales + first, inputs, x, y + first);
  }
}

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
        size <= kMostBesideFour
            ? multiply_few_fp8<kMostBesideFour, 4>(codes, scales, some, values, size, y)
            : multiply_few_fp8<kMostDecoding, kDecodingVectors>(codes, scales, some, values, size, y);
        continue;
      }
      const int64_t parts = (size + kMostSharing - 1) / kMostSharing;
      for (int64_t first = 0; first < kQuantizedTile; first += kSharingVectors * kWidth) {
        decode_block<kSharingVectors>({codes + first}, some, decoded);
        for (int64_t part = 0, r = 0; part < parts; ++part) {
          const int64_t together = (size - r) / (parts - part);  // so that parts are as equal as possible
          multiply_fp8_for<kMostSharing, kSharingVectors, DecodedValues<kSharingVectors>>(together)(
              {decoded}, scales + first, some, values + r * kFp8Block, y + r * kQuantizedTile + first);
          r += together;
        }
      }
    }
    finish<WeightFormat::kFp8>(tile, y, size, bias, out + chunk * row_stride, row_stride, count);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
