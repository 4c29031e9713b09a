// cvt: between integers, floating-point numbers and the 16-bit formats, with one rounding.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cuda_ptx/table.h"

namespace pymoe::ptx {
namespace {

enum class Rounding { kNearest, kZero, kDown, kUp };

double to_integral(double x, Rounding how) {
  switch (how) {
    case Rounding::kNearest: return std::nearbyint(x);
    case Rounding::kZero: return std::trunc(x);
    case Rounding::kDown: return std::floor(x);
    default: return std::ceil(x);
  }
}

// Numbers outside of the range become the nearest end of the range. NaN becomes 0, or only the highest bit if one of
// the types has 64 bits.
template <typename To, typename From, Rounding kHow>
To to_integer(From x) {
  if (x != x) {
    if (sizeof(From) < 8 && sizeof(To) < 8) return 0;
    return static_cast<To>(std::make_unsigned_t<To>{1} << (8 * sizeof(To) - 1));
  }
  const double whole = to_integral(static_cast<double>(x), kHow);
  const double end = std::ldexp(1.0, 8 * static_cast<int>(sizeof(To)) - std::is_signed_v<To>);
  if (whole >= end) return std::numeric_limits<To>::max();
  if (whole < (std::is_signed_v<To> ? -end : 0.0)) return std::numeric_limits<To>::min();
  return static_cast<To>(whole);
}

// Rounds any finite magnitude to a format with `kFraction` fraction bits and `kExponent` exponent bits: to nearest,
// ties to even, with subnormals; too large magnitudes become infinity.
template <int kExponent, int kFraction>
uint16_t to_small_format(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (x != x) return 0x7fff;
  const double magnitude = std::abs(static_cast<double>(x));
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr uint16_t kInfinity = ((1 << kExponent) - 1) << kFraction;
  if (std::isinf(magnitude)) return sign | kInfinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
  // The number of units in the last place of the value's binade: exact in double, rounded once.
  const double units = std::nearbyint(std::ldexp(magnitude, kFraction - exponent));
  const double rounded = std::ldexp(units, exponent - kFraction);
  if (rounded >= std::ldexp(1.0, kBias + 1)) return sign | kInfinity;
  const auto fraction = static_cast<int>(units);
  if (fraction < 1 << kFraction) return static_cast<uint16_t>(sign | fraction);  // subnormal
  // A carry into the next binade adds one to the exponent by itself.
  return static_cast<uint16_t>(sign | (((exponent + kBias - 1) << kFraction) + fraction));
}

uint16_t to_half(float x) { return to_small_format<5, 10>(x); }
uint16_t to_bfloat(float x) { return to_small_format<8, 7>(x); }

float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<float>::infinity() : std::bit_cast<float>(0x7fffffffu);
  }
  return sign *
         static_cast<float>(exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25));
}
float from_bfloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Converts between integers: a value that does not fit is truncated. The source may be the low bits of a wider
// register; the number of the register's bytes then follows the opcode.
template <typename To, typename From, typename Register>
void add_wider(Table& table, const std::string& opcode) {
  if constexpr (sizeof(Register) > sizeof(From)) {
    table[opcode + "/" + std::to_string(sizeof(Register))] =
        lanewise<[](Register a) { return static_cast<To>(static_cast<From>(a)); }, To, Register>();
  }
}
template <typename To>
void add_integers(Table& table, const std::string& to) {
  const auto add = [&]<typename From>(const std::string& from) {
    const std::string opcode = "cvt." + to + "." + from;
    if constexpr (sizeof(From) > 1) table[opcode] = lanewise<[](From a) { return static_cast<To>(a); }, To, From>();
    add_wider<To, From, uint16_t>(table, opcode);
    add_wider<To, From, uint32_t>(table, opcode);
    add_wider<To, From, uint64_t>(table, opcode);
  };
  add.template operator()<int8_t>("s8");
  add.template operator()<uint8_t>("u8");
  add.template operator()<int16_t>("s16");
  add.template operator()<uint16_t>("u16");
  add.template operator()<int32_t>("s32");
  add.template operator()<uint32_t>("u32");
  add.template operator()<int64_t>("s64");
  add.template operator()<uint64_t>("u64");
}

template <typename Float, typename Integer>
void add_mixed(Table& table, const std::string& real, const std::string& whole) {
  table["cvt.rn." + real + "." + whole] = lanewise<[](Integer a) { return static_cast<Float>(a); }, Float, Integer>();
  const std::string name = "." + whole + "." + real;
  table["cvt.rni" + name] = lanewise<to_integer<Integer, Float, Rounding::kNearest>, Integer, Float>();
  table["cvt.rzi" + name] = lanewise<to_integer<Integer, Float, Rounding::kZero>, Integer, Float>();
  table["cvt.rmi" + name] = lanewise<to_integer<Integer, Float, Rounding::kDown>, Integer, Float>();
  table["cvt.rpi" + name] = lanewise<to_integer<Integer, Float, Rounding::kUp>, Integer, Float>();
}

template <typename Float>
void add_real(Table& table, const std::string& real) {
  add_mixed<Float, int16_t>(table, real, "s16");
  add_mixed<Float, uint16_t>(table, real, "u16");
  add_mixed<Float, int32_t>(table, real, "s32");
  add_mixed<Float, uint32_t>(table, real, "u32");
  add_mixed<Float, int64_t>(table, real, "s64");
  add_mixed<Float, uint64_t>(table, real, "u64");
  const std::string name = "." + real + "." + real;
  const auto add = [&]<Rounding kHow>(const std::string& how) {
    table["cvt." + how + name] =
        lanewise<[](Float a) { return static_cast<Float>(to_integral(static_cast<double>(a), kHow)); }, Float, Float>();
  };
  add.template operator()<Rounding::kNearest>("rni");
  add.template operator()<Rounding::kZero>("rzi");
  add.template operator()<Rounding::kDown>("rmi");
  add.template operator()<Rounding::kUp>("rpi");
}

}  // namespace

void add_conversion(Table& table) {
  add_integers<int16_t>(table, "s16");
  add_integers<uint16_t>(table, "u16");
  add_integers<int32_t>(table, "s32");
  add_integers<uint32_t>(table, "u32");
  add_integers<int64_t>(table, "s64");
  add_integers<uint64_t>(table, "u64");
  add_real<float>(table, "f32");
  add_real<double>(table, "f64");
  table["cvt.f64.f32"] = lanewise<[](float a) { return static_cast<double>(a); }, double, float>();
  table["cvt.rn.f32.f64"] = lanewise<[](double a) { return static_cast<float>(a); }, float, double>();
  table["cvt.f32.f16"] = lanewise<from_half, float, uint16_t>();
  table["cvt.f64.f16"] = lanewise<[](uint16_t a) { return static_cast<double>(from_half(a)); }, double, uint16_t>();
  table["cvt.f32.bf16"] = lanewise<from_bfloat, float, uint16_t>();
  table["cvt.rn.f16.f32"] = lanewise<to_half, uint16_t, float>();
  table["cvt.rn.bf16.f32"] = lanewise<to_bfloat, uint16_t, float>();
  // The first operand becomes the upper half.
  table["cvt.rn.f16x2.f32"] =
      lanewise<[](float high, float low) { return static_cast<uint32_t>(to_half(high)) << 16 | to_half(low); },
               uint32_t, float, float>();
  table["cvt.rn.bf16x2.f32"] =
      lanewise<[](float high, float low) { return static_cast<uint32_t>(to_bfloat(high)) << 16 | to_bfloat(low); },
               uint32_t, float, float>();
}

}  // namespace pymoe::ptx
