// The loops of quantize_weight, compiled once per instruction set (see quantized_weight.h; no include guard on
// purpose).
//
// A lane is an output: every lane takes the steps of pymoe/reference/quantized_weight.py, whose sums run over the
// inputs from first to last.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr float kSmallestStep = 0x1p-100f;

PYMOE_INLINE vfloat clamp(vfloat value, float low, float high) {
  value = value > low ? value : broadcast(low);
  return value < high ? value : broadcast(high);
}

PYMOE_INLINE vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
PYMOE_INLINE vfloat magnitude(vfloat value) { return (vfloat)((vint32)value & 0x7fffffff); }

// Rounds to the nearest integer, ties to even, for magnitudes below 2^22.
PYMOE_INLINE vfloat round_to_integer(vfloat value) {
  const vfloat magic = broadcast(12582912.0f);
  return (value + magic) - magic;
}

PYMOE_INLINE vfloat round_to_bf16(vfloat value) {
  const vuint32 bits = (vuint32)value;
  return (vfloat)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// Rounds to bf16, towards plus infinity (kUp) or minus infinity.
template <bool kUp>
PYMOE_INLINE vfloat round_away(vfloat value) {
  const vint32 bits = (vint32)value;
  const vint32 away = ((bits & 0xffff) != 0) & (kUp ? value > 0 : value < 0);
  return (vfloat)((bits & ~0xffff) + (away & 0x10000));
}

// The inverse of a step, or 0 if the step is 0.
PYMOE_INLINE vfloat inverse_of(vfloat step) {
  const vint32 some = step > 0;
  const vfloat safe = some ? step : broadcast(1.0f);
  return some ? 1.0f / safe : vfloat{};
}

// A column of the tile's buffer: `values[i * kQuantizedTile]` are the outputs' weights of input i.
PYMOE_INLINE vfloat nearest_code(vfloat value, vfloat minimum, vfloat inverse) {
  return round_to_integer(clamp((value - minimum) * inverse, 0, 15));
}

inline vfloat squared_error(const float* values, int64_t count, vfloat scale, vfloat minimum) {
  const vfloat inverse = inverse_of(scale);
  vfloat error{};
  for (int64_t i = 0; i < count; ++i) {
    const vfloat value = load(values + i * kQuantizedTile);
    const vfloat miss = value - (scale * nearest_code(value, minimum, inverse) + minimum);
    error = error + miss * miss;
  }
  return error;
}

// Scale and minimum of a group of `count` inputs.
inline void fit_group(const float* values, int64_t count, vfloat& scale, vfloat& minimum) {
  vfloat least = load(values), greatest = least;
  for (int64_t i = 1; i < count; ++i) {
    least = min(least, load(values + i * kQuantizedTile));
    greatest = max(greatest, load(values + i * kQuantizedTile));
  }
  least = least + 0.0f;  // no negative zero
  minimum = round_away<false>(least);
  scale = round_away<true>((greatest - minimum) / 15.0f);
  scale = scale >= kSmallestStep ? scale : vfloat{};
  vfloat error = squared_error(values, count, scale, minimum);
  const vfloat reach = greatest - least, inverse_reach = inverse_of(reach >= kSmallestStep ? reach : vfloat{});
  const auto n = static_cast<float>(count);
  for (int candidate = 0; candidate < 8; ++candidate) {
    const vfloat steps = inverse_reach * static_cast<float>(14.0 + 0.4 * candidate);
    vfloat codes{}, squares{}, above{}, products{};
    for (int64_t i = 0; i < count; ++i) {
      const vfloat value = load(values + i * kQuantizedTile) - least;
      const vfloat code = round_to_integer(clamp(value * steps, 0, 15));
      codes = codes + code;
      squares = squares + code * code;
      above = above + value;
      products = products + value * code;
    }
    vfloat determinant = n * squares - codes * codes;
    determinant = determinant > 0 ? determinant : broadcast(1.0f);
    const vfloat new_scale = round_to_bf16((n * products - above * codes) / determinant);
    const vfloat new_minimum = round_to_bf16(least + (squares * above - codes * products) / determinant);
    const vint32 usable = (inverse_reach > 0) & (new_scale >= kSmallestStep);
    const vfloat tried_scale = usable ? new_scale : scale, tried_minimum = usable ? new_minimum : minimum;
    const vfloat new_error = squared_error(values, count, tried_scale, tried_minimum);
    const vint32 better = usable & (new_error < error);
    scale = better ? tried_scale : scale;
    minimum = better ? tried_minimum : minimum;
    error = better ? new_error : error;
  }
}

// Writes the codes of 4 bits of input i and of the outputs from `first` on.
PYMOE_INLINE void put_codes_4(uint8_t* words, int64_t i, int64_t first, vint32 codes) {
  const vint32 integers = codes << (i % 8 / 4 * 4);
  uint8_t* to = words + i / 8 * 4 * kQuantizedTile + first * 4 + i % 4;
  for (int lane = 0; lane < kLanes<float>; ++lane) to[4 * lane] |= static_cast<uint8_t>(integers[lane]);
}

// A group of 32 inputs of a tile at int4, of which `count` exist.
inline void quantize_group_4(const float* values, int64_t count, uint8_t* out) {
  auto* ends = reinterpret_cast<BFloat16*>(out);
  uint8_t* words = out + quantized_ends_bytes(WeightFormat::kInt4);
  memset(words, 0, static_cast<size_t>(kQuantizedTile * kQuantizedGroup / 2));
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    vfloat scale, minimum;
    fit_group(values + first, count, scale, minimum);
    store(ends + first, scale);
    store(ends + kQuantizedTile + first, minimum);
    const vfloat inverse = inverse_of(scale);
    for (int64_t i = 0; i < count; ++i) {
      const vfloat code = nearest_code(load(values + first + i * kQuantizedTile), minimum, inverse);
      put_codes_4(words, i, first, __builtin_convertvector(code, vint32));
    }
  }
}

// The same at mxfp4.
inline void quantize_group_mxfp4(const float* values, int64_t count, uint8_t* out) {
  uint8_t* words = out + quantized_ends_bytes(WeightFormat::kMxfp4);
  memset(words, 0, static_cast<size_t>(kQuantizedTile * kQuantizedGroup / 2));
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    vfloat largest{};
    for (int64_t i = 0; i < count; ++i) largest = max(largest, magnitude(load(values + first + i * kQuantizedTile)));
    const vint32 exponent = ((vint32)largest >> 23) - 2;  // 6, the largest value, is 1.5 * 2^2
    const vint32 scale = exponent > 0 ? exponent : vint32{};
    for (int lane = 0; lane < kLanes<float>; ++lane) out[first + lane] = static_cast<uint8_t>(scale[lane]);
    const vfloat inverse = (vfloat)((254 - scale) << 23);
    for (int64_t i = 0; i < count; ++i) {
      const vfloat value = load(values + first + i * kQuantizedTile), scaled = magnitude(value) * inverse;
      // Lanes of a comparison are -1. A tie goes to the even code.
      const vint32 passed = (scaled > 0.25f) + (scaled >= 0.75f) + (scaled > 1.25f) + (scaled >= 1.75f) +
                            (scaled > 2.5f) + (scaled >= 3.5f) + (scaled > 5.0f);
      const auto sign = (vint32)((vuint32)value >> 31);
      put_codes_4(words, i, first, (sign << 3) - passed);
    }
  }
}

// The same at int8; the scales of the outputs are already written.
inline void quantize_group_8(const float* values, int64_t count, const float* scales, uint8_t* out) {
  memset(out, 128, static_cast<size_t>(kQuantizedTile * kQuantizedGroup));
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    const vfloat scale = load(scales + first), divisor = scale > 0 ? scale : broadcast(1.0f);
    for (int64_t i = 0; i < count; ++i) {
      const vfloat code =
          round_to_integer(clamp(load(values + first + i * kQuantizedTile) / divisor, -127, 127)) + 128.0f;
      const vint32 integers = __builtin_convertvector(code, vint32);
      uint8_t* to = out + i / 4 * 4 * kQuantizedTile + first * 4 + i % 4;
      for (int lane = 0; lane < kLanes<float>; ++lane) to[4 * lane] = static_cast<uint8_t>(integers[lane]);
    }
  }
}

// The same at fp8, for outputs that share one scale.
inline void quantize_group_fp8(const float* values, int64_t count, float scale, uint8_t* out) {
  memset(out, 0, static_cast<size_t>(kQuantizedTile * kQuantizedGroup));
  const vfloat divisor = broadcast(scale > 0 ? scale : 1.0f);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
      const vfloat quotient = load(values + first + i * kQuantizedTile) / divisor, size = magnitude(quotient);
      const vint32 bits = (vint32)size;
      // Both round to the nearest, ties to even: to 3 bits of mantissa, or below 2^-6 to a multiple of 2^-9.
      const vint32 normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
      const vint32 small = (vint32)(size + 0x1p14f) - (vint32)broadcast(0x1p14f);
      const vint32 code = size < 0x1p-6f ? small : normal;
      const auto sign = (vint32)((vuint32)quotient >> 31);
      const vint32 codes = code | sign << 7;
      uint8_t* to = out + i * kQuantizedTile + first;
      for (int lane = 0; lane < kLanes<float>; ++lane) to[lane] = static_cast<uint8_t>(codes[lane]);
    }
  }
}

// scales[output] = the largest magnitude so far, from the earlier inputs and `count` inputs.
inline void raise_to_largest(const float* values, int64_t count, float* scales) {
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    vfloat largest = load(scales + first);
    for (int64_t i = 0; i < count; ++i) largest = max(largest, magnitude(load(values + first + i * kQuantizedTile)));
    store(scales + first, largest);
  }
}

// The scale of the outputs of a block at fp8, from their largest magnitudes.
inline float scale_of_block(const float* largest) {
  float most = 0;
  for (int64_t output = 0; output < kQuantizedTile; ++output) most = largest[output] > most ? largest[output] : most;
  const float scale = most / 448.0f;
  return scale >= kSmallestStep ? scale : 0.0f;
}

inline void scale_from_largest(float* scales) {
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    const vfloat scale = load(scales + first) / 127.0f;
    store(scales + first, scale >= kSmallestStep ? scale : vfloat{});
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
