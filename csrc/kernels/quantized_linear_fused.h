// The products of quantized_linear that use fused multiply-adds, for weights in fp8 and in the affine and symmetric
// formats (see quantized_linear.h; no include guard on purpose).
//
// A vector holds the values of the codes of as many outputs as it has lanes. The sum of a block of 128 inputs starts
// from zero and takes one fused multiply-add per input, in the order of the inputs; then y += sum, in fp8 y += sum *
// scale, with both steps rounded. These are IEEE operations on single lanes, so the bits are the same on every
// processor. Few rows decode codes in registers; many rows share the decoded values of a block, which stay in the
// nearest cache.
//
// The value of an affine code is the weight: one more fused multiply-add, of the code, its scale and its offset. The
// value of a symmetric code is also the weight: the product of the code and its scale, rounded.
//
// A code of fp8 is a sign, 4 bits of exponent with bias 7, and 3 bits of mantissa; 0x7f and 0xff are NaN, and there is
// no infinity. To decode it, its exponent is put in the lowest exponent bits of an fp32, and its mantissa in the
// highest mantissa bits. That fp32 is 2^-120 times the value of the code, so a product with 2^120 gives the value, also
// of a subnormal code. A subnormal code makes a subnormal fp32, so the caller turns off the flushing of subnormals. NaN
// codes are looked for separately: one makes the sum of its block NaN for every row.

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)_mm512_fmadd_ps(a, b, sum); }
#elif PYMOE_ISA_LEVEL == 3
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)_mm256_fmadd_ps(a, b, sum); }
#elif PYMOE_NEON
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) { return (vfloat)vfmaq_f32(sum, a, b); }
#else
PYMOE_INLINE vfloat fused_multiply_add(vfloat a, vfloat b, vfloat sum) {
  for (int lane = 0; lane < kLanes<float>; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
  return sum;
}
#endif

// The location of a block's weights: the start of the block in the packed tile, the first output to use there, and a
// buffer with the block's decoded values (null if codes are decoded in registers).
struct BlockSource {
  const uint8_t* block;
  int64_t first;
  const float* decoded;
};

PYMOE_INLINE vint32 load_signed_bytes(const uint8_t* source) {
#if PYMOE_ISA_LEVEL == 4
  return (vint32)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif PYMOE_ISA_LEVEL == 3
  return (vint32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#elif PYMOE_NEON
  uint32_t four;
  memcpy(&four, source, sizeof(four));
  return (vint32)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
#else
  vint32 bytes{};
  for (int lane = 0; lane < kLanes<float>; ++lane) bytes[lane] = static_cast<int8_t>(source[lane]);
  return bytes;
#endif
}

// Returns the values of one vector of fp8 codes. A NaN code gives 480 with its sign.
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
  // Returns a vector with all bits set, which is NaN, in the lanes of outputs that have a NaN, and zeros in the others.
  PYMOE_INLINE vint32 lanes(int vector) const {
    uint8_t bytes[sizeof(largest_)];
    memcpy(bytes, largest_, sizeof(bytes));
    return load_signed_bytes(bytes + vector * kLanes<float>) == 0x7f;
  }

 private:
  vcodes largest_[kVectors / 2] = {};
};

// Widens `count` <= 128 values to fp32, and pads them with zeros to 128.
template <typename T>
void widen_block(const T* x, int64_t count, int8_t* to, RoundedBlock&) {
  auto* values = reinterpret_cast<float*>(to);
  if (count < kRoundedInputs) memset(values, 0, static_cast<size_t>(kWidenedBytes));
  for_vectors<T>(count, [&](int64_t i, int size) { store_count(values + i, load_count(x + i, size), size); });
}

// The weights in the packed tile (in fp8 the values of their codes, not yet scaled), for the outputs of kVectors
// vectors. They are decoded kInputs inputs at a time. Inputs come in runs; call begin_run() at the start of each.
template <WeightFormat kFormat, int kVectors>
class StoredCodes {
 public:
  static constexpr int64_t kRun = fused_run(kFormat);
  static constexpr int kBits = static_cast<int>(bits_of(kFormat));
  static constexpr int kInputs = 8 / kBits;

  PYMOE_INLINE explicit StoredCodes(const BlockSource& from) : from_(from) {}

  PYMOE_INLINE void begin_run(int64_t input) {
    const uint8_t* run = from_.block + fused_begin(kFormat, input);
    codes_ = run + fused_head_bytes(kFormat) + from_.first;
    if constexpr (kFormat != WeightFormat::kFp8) {
      const auto* scales = reinterpret_cast<const float*>(run) + from_.first;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        scales_[v] = load(scales + v * kLanes<float>);
        if constexpr (is_affine(kFormat)) offsets_[v] = load(scales + kQuantizedTile + v * kLanes<float>);
      }
      if (from_.first == 0) {
        for (int64_t line = 0; line < fused_head_bytes(kFormat); line += 64) __builtin_prefetch(run + line + kAhead);
      }
    }
  }
  // Loads the weights of kInputs inputs of the run, starting at input `input` of the run.
  PYMOE_INLINE void load_inputs(int64_t input, vfloat (&values)[kInputs][kVectors]) {
    const uint8_t* from = codes_ + input / kInputs * kQuantizedTile;
    __builtin_prefetch(from + kAhead);
    if constexpr (kFormat == WeightFormat::kFp8) nan_.see(from);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kFormat == WeightFormat::kFp8) {
        values[0][v] = decode(from + v * kLanes<float>);
      } else if constexpr (kFormat == WeightFormat::kSymmetric8) {
        values[0][v] = to_float(load_signed_bytes(from + v * kLanes<float>)) * scales_[v];
      } else {
        const vint32 codes = load_bytes(from + v * kLanes<float>);
#pragma GCC unroll 4
        for (int i = 0; i < kInputs; ++i) {
          const vint32 lowest = codes >> i * kBits;
          values[i][v] = weight(i == kInputs - 1 ? lowest : lowest & ((1 << kBits) - 1), v);
        }
      }
    }
  }
  // Returns the sum of a block, or NaN in the lanes where one of its weights was NaN.
  PYMOE_INLINE vfloat with_nan(vfloat sum, int vector) const {
    if constexpr (kFormat != WeightFormat::kFp8) return sum;  // NaN scales and offsets have made it NaN
    return (vfloat)((vint32)sum | nan_.lanes(vector));
  }

 private:
  BlockSource from_;
  const uint8_t* codes_ = nullptr;
  NanAmong<kVectors> nan_{};
  vfloat scales_[kVectors], offsets_[kVectors];

  PYMOE_INLINE vfloat weight(vint32 codes, int vector) const {
    return fused_multiply_add(to_float(codes), scales_[vector], offsets_[vector]);
  }
};

template <int kVectors>
class DecodedValues {
 public:
  static constexpr int64_t kRun = kRoundedInputs;
  static constexpr int kInputs = 1;

  PYMOE_INLINE explicit DecodedValues(const BlockSource& from) : decoded_(from.decoded) {}

  PYMOE_INLINE void begin_run(int64_t) {}
  PYMOE_INLINE void load_inputs(int64_t input, vfloat (&values)[1][kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) values[0][v] = load(decoded_ + (input * kVectors + v) * kLanes<float>);
  }
  PYMOE_INLINE vfloat with_nan(vfloat sum, int) const { return sum; }

 private:
  const float* decoded_;
};

// Calls body(input, values) for the inputs of a block, kInputs at a time.
template <int kVectors, typename Weights, typename Body>
PYMOE_INLINE void for_inputs(Weights& weights, int64_t inputs, const Body& body) {
  for (int64_t run = 0; run < inputs; run += Weights::kRun) {
    weights.begin_run(run);
    const int64_t end = inputs - run < Weights::kRun ? inputs : run + Weights::kRun;
    for (int64_t input = run; input < end; input += Weights::kInputs) {
      vfloat values[Weights::kInputs][kVectors];
      weights.load_inputs(input - run, values);
#pragma GCC unroll 4
      for (int i = 0; i < Weights::kInputs; ++i) body(input + i, values[i]);
    }
  }
}

// Decodes the codes of a block for DecodedValues. If an output has a NaN, its first value becomes NaN, and so do all
// its sums.
template <WeightFormat kFormat, int kVectors>
void decode_block(const BlockSource& from, int64_t inputs, float* decoded) {
  StoredCodes<kFormat, kVectors> stored(from);
  for_inputs<kVectors>(
      stored, inputs, [&](int64_t input, const vfloat(&values)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(decoded + (input * kVectors + v) * kLanes<float>, values[v]);
      });
  for (int v = 0; v < kVectors; ++v) {
    float* first = decoded + v * kLanes<float>;
    store(first, stored.with_nan(load(first), v));
  }
}

// Adds the products of a block, in fp8 times their scales, to y[r][output] for kRows rows r and the outputs of kVectors
// vectors. `x` contains 128 values of the block for each row, one row after the other. `y` points to the first row and
// output; its rows have 64 outputs.
template <WeightFormat kFormat, int kRows, int kVectors, typename Weights>
void multiply_fused(const BlockSource& from, int64_t inputs, const float* PYMOE_RESTRICT x, float* PYMOE_RESTRICT y) {
  Weights weights(from);
  vfloat sums[kRows][kVectors] = {};
  for_inputs<kVectors>(
      weights, inputs, [&](int64_t input, const vfloat(&values)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const vfloat factor = broadcast(x[r * kRoundedInputs + input]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[r][v] = fused_multiply_add(values[v], factor, sums[r][v]);
        }
      });
  const auto* scales = reinterpret_cast<const float*>(from.block) + from.first;  // of fp8
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* sum = y + r * kQuantizedTile + v * kLanes<float>;
      vfloat products = weights.with_nan(sums[r][v], v);
      if constexpr (kFormat == WeightFormat::kFp8) products = products * load(scales + v * kLanes<float>);
      store(sum, load(sum) + products);
    }
  }
}

using MultiplyFused = void (*)(const BlockSource&, int64_t, const float*, float*);

// Returns the function for `rows` rows, 1 <= rows <= kMost.
template <WeightFormat kFormat, int kMost, int kVectors, typename Weights>
MultiplyFused multiply_fused_for(int64_t rows) {
  return [rows]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr MultiplyFused functions[] = {&multiply_fused<kFormat, i + 1, kVectors, Weights>...};
    return functions[rows - 1];
  }(std::make_integer_sequence<int, kMost>{});
}

// The largest numbers of rows that are multiplied together. Up to kMostDecoding rows decode codes in registers: up to
// kMostBesideFour with four vectors of outputs at a time, more with two. Beyond that, kMostSharing rows at a time share
// decoded values. The sums must fit into the registers, but be enough to hide the latency of the additions. The affine
// formats have scales and offsets in registers, too, and the symmetric format has scales.
#if PYMOE_ISA_LEVEL == 4 || PYMOE_NEON
template <WeightFormat kFormat>
inline constexpr int kMostBesideFour = kFormat == WeightFormat::kFp8 ? 6 : 4;
inline constexpr int kMostDecoding = 6, kMostSharing = 12;
#else
template <WeightFormat kFormat>
inline constexpr int kMostBesideFour = 1;
inline constexpr int kMostDecoding = 4, kMostSharing = 6;
#endif
inline constexpr int kSharingVectors = 2;

// Adds the products of a block to y, for `rows` <= kMost rows. The codes are decoded in registers.
template <WeightFormat kFormat, int kMost, int kVectors>
void multiply_few_fused(const uint8_t* block, int64_t inputs, const float* x, int64_t rows, float* y) {
  const auto function = multiply_fused_for<kFormat, kMost, kVectors, StoredCodes<kFormat, kVectors>>(rows);
  for (int64_t first = 0; first < kQuantizedTile; first += kVectors * kLanes<float>) {
    function({block, first, nullptr}, inputs, x, y + first);
  }
}

// Does the same as multiply_tile of quantized_linear_cpu_body.h, for the formats of this file.
template <WeightFormat kFormat, typename T>
void multiply_tile_fused(const uint8_t* tile, int64_t inputs, const RoundedRows& x, const T* bias, T* out,
                         int64_t row_stride, int64_t count) {
  constexpr int64_t kChunk = 96;  // number of rows whose sums stay in the nearest caches
  constexpr int kWidth = kLanes<float>;
  alignas(64) float y[kChunk * kQuantizedTile];
  alignas(64) float decoded[kRoundedInputs * kSharingVectors * kWidth];
  for (int64_t chunk = 0; chunk < x.count; chunk += kChunk) {
    const int64_t size = x.count - chunk < kChunk ? x.count - chunk : kChunk;
    memset(y, 0, static_cast<size_t>(size * kQuantizedTile) * sizeof(float));
    for (int64_t block = 0; block < rounded_blocks(inputs); ++block) {
      const int64_t rest = (quantized_groups(inputs) * kQuantizedGroup) - block * kRoundedInputs;
      const int64_t some = rest < kRoundedInputs ? rest : kRoundedInputs;
      const uint8_t* from = tile + fused_begin(kFormat, block * kRoundedInputs);
      const auto* values = reinterpret_cast<const float*>(x.codes + block * x.codes_stride + chunk * kWidenedBytes);
      if (size <= kMostDecoding) {
        size <= kMostBesideFour<kFormat>
            ? multiply_few_fused<kFormat, kMostBesideFour<kFormat>, 4>(from, some, values, size, y)
            : multiply_few_fused<kFormat, kMostDecoding, 2>(from, some, values, size, y);
        continue;
      }
      const int64_t parts = (size + kMostSharing - 1) / kMostSharing;
      for (int64_t first = 0; first < kQuantizedTile; first += kSharingVectors * kWidth) {
        const BlockSource source{from, first, decoded};
        decode_block<kFormat, kSharingVectors>(source, some, decoded);
        for (int64_t part = 0, r = 0; part < parts; ++part) {
          const int64_t together = (size - r) / (parts - part);  // so that parts are as equal as possible
          multiply_fused_for<kFormat, kMostSharing, kSharingVectors, DecodedValues<kSharingVectors>>(together)(
              source, some, values + r * kRoundedInputs, y + r * kQuantizedTile + first);
          r += together;
        }
      }
    }
    finish<kFormat>(tile, y, size, bias, out + chunk * row_stride, row_stride, count);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
