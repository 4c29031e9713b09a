// Converts every 16-bit pattern in both directions, and checks rounding by exact arithmetic in double.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "core/dtype.h"

using namespace pymoe;

namespace {

template <typename T>
T from_bits(uint16_t bits) {
  T value;
  value.bits = bits;
  return value;
}

// Returns the value of a 16-bit float by its definition.
double defined_value(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <typename T>
int count_wrong_widenings(int exponent_bits, int mantissa_bits) {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double expected = defined_value(static_cast<uint16_t>(bits), exponent_bits, mantissa_bits);
    const float got = to_accumulate(from_bits<T>(static_cast<uint16_t>(bits)));
    const bool same =
        std::isnan(expected) ? std::isnan(got) : got == expected && std::signbit(got) == std::signbit(expected);
    wrong += !same;
  }
  return wrong;
}

template <typename T>
int count_wrong_round_trips() {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float wide = to_accumulate(from_bits<T>(static_cast<uint16_t>(bits)));
    const uint16_t back = round_to<T>(wide).bits;
    wrong += std::isnan(wide) ? !std::isnan(to_accumulate(from_bits<T>(back))) : back != bits;
  }
  return wrong;
}

// Rounds values below, at and above the midpoint between each pair of consecutive floats. `largest` is the greatest
// finite pattern; values past it round as if the next power of two followed it, and that counts as infinity.
template <typename T>
int count_wrong_roundings(uint16_t largest) {
  int wrong = 0;
  for (uint32_t bits = 0; bits <= largest; ++bits) {
    const double low = to_accumulate(from_bits<T>(static_cast<uint16_t>(bits)));
    const double below = bits == 0 ? 0 : to_accumulate(from_bits<T>(static_cast<uint16_t>(bits - 1)));
    const double high =
        bits < largest ? to_accumulate(from_bits<T>(static_cast<uint16_t>(bits + 1))) : low + (low - below);
    const auto middle = static_cast<float>((low + high) / 2);
    if (static_cast<double>(middle) != (low + high) / 2) continue;  // below the smallest float: no midpoint
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float direction = sign ? -1.0f : 1.0f;
      wrong += round_to<T>(direction * std::nextafter(middle, 0.0f)).bits != (bits | sign);
      wrong += round_to<T>(direction * middle).bits != (even | sign);
      wrong += round_to<T>(direction * std::nextafter(middle, INFINITY)).bits != ((bits + 1) | sign);
    }
  }
  return wrong;
}

}  // namespace

TEST_CASE("fp16 widens to its defined value, all patterns") { CHECK(count_wrong_widenings<Float16>(5, 10) == 0); }
TEST_CASE("bf16 widens to its defined value, all patterns") { CHECK(count_wrong_widenings<BFloat16>(8, 7) == 0); }
TEST_CASE("fp16 comes back bit for bit") { CHECK(count_wrong_round_trips<Float16>() == 0); }
TEST_CASE("bf16 comes back bit for bit") { CHECK(count_wrong_round_trips<BFloat16>() == 0); }
TEST_CASE("fp16 rounds to nearest even between all neighbours") { CHECK(count_wrong_roundings<Float16>(0x7bff) == 0); }
TEST_CASE("bf16 rounds to nearest even between all neighbours") { CHECK(count_wrong_roundings<BFloat16>(0x7f7f) == 0); }

// gcc 12 has no _Float16 for C++ on aarch64.
#if defined(__aarch64__)
using CompilersFloat16 = __fp16;
#else
using CompilersFloat16 = _Float16;
#endif

TEST_CASE("fp16 rounding agrees with the compiler's 16-bit float") {
  int wrong = 0;
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 509) {  // a prime: visits every pattern of the low bits
    const float value = bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    wrong += round_to<Float16>(value).bits != bit_cast<uint16_t>(static_cast<CompilersFloat16>(value));
  }
  CHECK(wrong == 0);
}

TEST_CASE("NaN stays NaN with its sign class, infinities stay") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(round_to<BFloat16>(nan).bits == 0x7fc0);
  CHECK((round_to<Float16>(nan).bits & 0x7fff) == 0x7e00);
  // A NaN whose payload is in the low bits only must not become an infinity.
  CHECK(std::isnan(to_accumulate(round_to<BFloat16>(bit_cast<float>(0x7f800001u)))));
  CHECK(std::isnan(to_accumulate(round_to<Float16>(bit_cast<float>(0xff800001u)))));
  CHECK(round_to<BFloat16>(-INFINITY).bits == 0xff80);
  CHECK(round_to<Float16>(INFINITY).bits == 0x7c00);
}
