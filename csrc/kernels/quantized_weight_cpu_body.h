// The loops of quantize_weight, compiled once per instruction set (see quantized_weight.h; no include guard on
// purpose).
//
// Each lane of a vector quantizes one output, by the steps of pymoe/reference/quantized_weight.py. Sums run over the
// inputs from first to last.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr float kSmallestStep = 0x1p-100f;
inline constexpr int kCandidates = 6;

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

// Returns the reciprocal of `step`, or 0 if `step` is 0.
PYMOE_INLINE vfloat inverse_of(vfloat step) {
  const vint32 some = step > 0;
  const vfloat safe = some ? step : broadcast(1.0f);
  return some ? 1.0f / safe : vfloat{};
}

// Below, `values` points to a vector of outputs in the buffer of a tile. The weights of these outputs for input i begin
// at values[i * kQuantizedTile].
PYMOE_INLINE vfloat nearest_code(vfloat value, vfloat minimum, vfloat inverse) {
  return round_to_integer(clamp((value - minimum) * inverse, 0, 15));
}

// Returns the sum of the squared errors that rounding a group of `count` inputs to the grid of `scale` and `minimum`
// would cause. Stores the sum of the codes in `sum_of_codes`.
inline vfloat squared_error(const float* values, int64_t count, vfloat scale, vfloat minimum, vfloat& sum_of_codes) {
  const vfloat inverse = inverse_of(scale);
  vfloat error{}, codes{};
  for (int64_t i = 0; i < count; ++i) {
    const vfloat value = load(values + i * kQuantizedTile), code = nearest_code(value, minimum, inverse);
    const vfloat miss = value - (scale * code + minimum);
    error = error + miss * miss;
    codes = codes + code;
  }
  sum_of_codes = codes;
  return error;
}

// Fits a scale and a minimum to a group of `count` inputs; neither is rounded yet. The minimum is at most 0.
inline void fit_group(const float* values, int64_t count, vfloat& scale, vfloat& minimum) {
  vfloat least{}, greatest = load(values);
  for (int64_t i = 0; i < count; ++i) {
    least = min(least, load(values + i * kQuantizedTile));
    greatest = max(greatest, load(values + i * kQuantizedTile));
  }
  const vfloat reach = greatest - least;
  minimum = least;
  scale = reach / 15.0f;
  scale = scale >= kSmallestStep ? scale : vfloat{};
  vfloat unused;
  vfloat error = squared_error(values, count, scale, minimum, unused);
  const vfloat inverse_reach = inverse_of(reach >= kSmallestStep ? reach : vfloat{});
  const auto n = static_cast<float>(count);
  for (int candidate = 0; candidate < kCandidates; ++candidate) {
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
    const vfloat fitted_minimum = least + (squares * above - codes * products) / determinant;
    const vint32 positive = fitted_minimum > 0;  // a grid from zero on fits best
    const vfloat from_zero = (products + least * codes) / (squares > 0 ? squares : broadcast(1.0f));
    const vfloat new_scale = positive ? from_zero : (n * products - above * codes) / determinant;
    const vfloat new_minimum = positive ? vfloat{} : fitted_minimum;
    const vint32 usable = (inverse_reach > 0) & (new_scale >= kSmallestStep);
    const vfloat tried_scale = usable ? new_scale : scale, tried_minimum = usable ? new_minimum : minimum;
    const vfloat new_error = squared_error(values, count, tried_scale, tried_minimum, unused);
    const vint32 better = usable & (new_error < error);
    scale = better ? tried_scale : scale;
    minimum = better ? tried_minimum : minimum;
    error = better ? new_error : error;
  }
}

// Returns the power of two (e8m0) for an int4 output whose weights have at most the magnitude `largest`. That magnitude
// divided by the power is below 2^20, so that factors are far from the limits of fp16.
PYMOE_INLINE vint32 power_for(vfloat largest) {
  const vint32 power = ((vint32)largest >> 23) - 19;
  return power > 0 ? power : vint32{};
}

// Returns a factor of a super-block: the greatest of its scales (or minima) divided by 63 and rounded to fp16. Also
// writes the factor to `out`, as fp16.
PYMOE_INLINE vfloat factor_of(vfloat greatest, uint8_t* out) {
  auto* half = reinterpret_cast<Float16*>(out);
  store(half, greatest / 63.0f);
  return load(half);
}

PYMOE_INLINE vfloat nearest_field(vfloat value, vfloat inverse) {
  return round_to_integer(clamp(value * inverse, 0, 63));
}

// Writes the 4-bit codes of input i for the outputs from `first` on. Those bits must be zero before.
PYMOE_INLINE void put_codes_4(uint8_t* words, int64_t i, int64_t first, vint32 codes) {
  const vint32 integers = codes << (i % 8 / 4 * 4);
  uint8_t* to = words + i / 8 * 4 * kQuantizedTile + first * 4 + i % 4;
  for (int lane = 0; lane < kLanes<float>; ++lane) to[4 * lane] |= static_cast<uint8_t>(integers[lane]);
}

// Puts a 6-bit integer into field `i` of a super-block's words; the bits of the field must be zero before.
PYMOE_INLINE void put_field(vuint32 (&words)[3], int64_t i, vfloat value) {
  const auto bits = (vuint32) __builtin_convertvector(value, vint32);
  const int64_t word = 6 * i / 32, shift = 6 * i % 32;
  words[word] |= bits << static_cast<int>(shift);
  if (shift > 26) words[word + 1] |= bits >> static_cast<int>(32 - shift);
}

// Packs a super-block of an int4 tile, which has `count` inputs and begins at `out`. `largest` are the largest
// magnitudes in the rows of the outputs. Divides `values` by the rows' powers of two, in place.
inline void quantize_super_4(float* values, int64_t count, const float* largest, uint8_t* out) {
  const int64_t groups = quantized_groups(count);
  uint8_t* const codes = out + quantized_super_bytes(WeightFormat::kInt4);
  memset(codes, 0, static_cast<size_t>(groups * quantized_group_bytes(WeightFormat::kInt4)));
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    const auto inverse_power = (vfloat)((254 - power_for(load(largest + first))) << 23);
    for (int64_t i = 0; i < count; ++i) {
      float* value = values + i * kQuantizedTile + first;
      store(value, load(value) * inverse_power);
    }
    const auto group_of = [&](int64_t g) { return values + g * kQuantizedGroup * kQuantizedTile + first; };
    const auto inputs_of = [&](int64_t g) {
      return count - g * kQuantizedGroup < kQuantizedGroup ? count - g * kQuantizedGroup : kQuantizedGroup;
    };
    vfloat scales[kSuperGroups], minima[kSuperGroups], greatest_scale{}, greatest_minimum{};  // minima without sign
    for (int64_t g = 0; g < groups; ++g) {
      fit_group(group_of(g), inputs_of(g), scales[g], minima[g]);
      minima[g] = 0.0f - minima[g];  // no negative zero
      greatest_scale = max(greatest_scale, scales[g]);
      greatest_minimum = max(greatest_minimum, minima[g]);
    }
    const vfloat d = factor_of(greatest_scale, out + 2 * first);
    const vfloat dmin = factor_of(greatest_minimum, out + 2 * (kQuantizedTile + first));
    const vfloat inverse_d = inverse_of(d), inverse_dmin = inverse_of(dmin);
    vuint32 words[3] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const float* group = group_of(g);
      const int64_t inputs = inputs_of(g);
      const vfloat rounded = nearest_field(scales[g], inverse_d);
      vfloat scale = rounded, minimum = nearest_field(minima[g], inverse_dmin);
      vfloat sum_of_codes, unused, sum{};
      vfloat error = squared_error(group, inputs, d * scale, -(dmin * minimum), sum_of_codes);
      for (int64_t i = 0; i < inputs; ++i) sum = sum + load(group + i * kQuantizedTile);
      for (int side = -1; side <= 1; side += 2) {  // the neighbours, each with the minimum that fits it and these codes
        const vfloat new_scale = clamp(rounded + static_cast<float>(side), 0, 63);
        const vfloat below = ((d * new_scale) * sum_of_codes - sum) / static_cast<float>(inputs);
        const vfloat new_minimum = nearest_field(below, inverse_dmin);
        const vfloat new_error = squared_error(group, inputs, d * new_scale, -(dmin * new_minimum), unused);
        const vint32 better = new_error < error;
        scale = better ? new_scale : scale;
        minimum = better ? new_minimum : minimum;
        error = better ? new_error : error;
      }
      put_field(words, g, scale);
      put_field(words, kSuperGroups + g, minimum);
      const vfloat step = d * scale, from = -(dmin * minimum), inverse = inverse_of(step);
      for (int64_t i = 0; i < inputs; ++i) {
        const vfloat code = nearest_code(load(group + i * kQuantizedTile), from, inverse);
        put_codes_4(codes + g * quantized_group_bytes(WeightFormat::kInt4), i, first,
                    __builtin_convertvector(code, vint32));
      }
    }
    for (int i = 0; i < 3; ++i) memcpy(out + (4 + 4 * i) * kQuantizedTile + 4 * first, &words[i], sizeof(words[i]));
  }
}

// Writes the powers of two of an int4 tile, for outputs whose largest magnitudes are `largest`.
inline void powers_from_largest(const float* largest, uint8_t* out) {
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    const vint32 power = power_for(load(largest + first));
    for (int lane = 0; lane < kLanes<float>; ++lane) out[first + lane] = static_cast<uint8_t>(power[lane]);
  }
}

// Packs a group of 32 inputs of an mxfp4 tile; only the first `count` inputs exist.
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
      // Lanes of a true comparison are -1, so the code is -passed. A tie goes to the even code.
      const vint32 passed = (scaled > 0.25f) + (scaled >= 0.75f) + (scaled > 1.25f) + (scaled >= 1.75f) +
                            (scaled > 2.5f) + (scaled >= 3.5f) + (scaled > 5.0f);
      const auto sign = (vint32)((vuint32)value >> 31);
      put_codes_4(words, i, first, (sign << 3) - passed);
    }
  }
}

// Packs a group of inputs of an int8 tile; only the first `count` inputs exist. `scales` are those of the outputs.
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

// Packs a group of inputs of an fp8 tile, for outputs that share one scale; only the first `count` inputs exist.
inline void quantize_group_fp8(const float* values, int64_t count, float scale, uint8_t* out) {
  memset(out, 0, static_cast<size_t>(kQuantizedTile * kQuantizedGroup));
  const vfloat divisor = broadcast(scale > 0 ? scale : 1.0f);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
      const vfloat quotient = load(values + first + i * kQuantizedTile) / divisor, size = magnitude(quotient);
      const vint32 bits = (vint32)size;
      // Both round to nearest, ties to even: `normal` to 3 bits of mantissa, `small`, for magnitudes below 2^-6, to a
      // multiple of 2^-9.
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

// Raises scales[output] to the largest magnitude among `count` more inputs of the output.
inline void raise_to_largest(const float* values, int64_t count, float* scales) {
  for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
    vfloat largest = load(scales + first);
    for (int64_t i = 0; i < count; ++i) largest = max(largest, magnitude(load(values + first + i * kQuantizedTile)));
    store(scales + first, largest);
  }
}

// Returns the scale of an fp8 block, from the largest magnitudes of its outputs.
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
