// Arithmetic and comparison of floating-point numbers: each operation rounds once to nearest, and keeps subnormals.
//
// Only instructions with a rounding qualifier are known. The assembler may fuse add.f32, sub.f32 and mul.f32 without
// .rn, which changes results, so a kernel that promises bits must not contain them. They are refused as unknown; so is
// all code with sums of products that was compiled without --fmad=false. Approximations, such as ex2.approx, promise no
// bits, and are unknown, too, except for the one with which CUDA's division in double precision begins.
//
// This file must be compiled with -ffp-contract=off.
#include <cmath>
#include <limits>

#include "cuda_ptx/table.h"

namespace pymoe::ptx {
namespace {

// Every NaN that a single-precision instruction makes has the same bits; in double precision they are left as they
// come.
template <typename T>
T canonical(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return x == x ? x : std::bit_cast<float>(0x7fffffffu);
  } else {
    return x;
  }
}

// Returns the operand that is a number; -0 is below +0.
template <typename T>
T least(T a, T b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <typename T>
T greatest(T a, T b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

template <typename T>
void add_arithmetic(Table& table, const std::string& type) {
  table["add.rn." + type] = lanewise<[](T a, T b) { return canonical(a + b); }, T, T, T>();
  table["sub.rn." + type] = lanewise<[](T a, T b) { return canonical(a - b); }, T, T, T>();
  table["mul.rn." + type] = lanewise<[](T a, T b) { return canonical(a * b); }, T, T, T>();
  table["div.rn." + type] = lanewise<[](T a, T b) { return canonical(a / b); }, T, T, T>();
  table["rcp.rn." + type] = lanewise<[](T a) { return canonical(T{1} / a); }, T, T>();
  table["sqrt.rn." + type] = lanewise<[](T a) { return canonical(std::sqrt(a)); }, T, T>();
  table["fma.rn." + type] = lanewise<[](T a, T b, T c) { return canonical(std::fma(a, b, c)); }, T, T, T, T>();
  table["min." + type] = lanewise<least<T>, T, T, T>();
  table["max." + type] = lanewise<greatest<T>, T, T, T>();
  table["neg." + type] = lanewise<[](T a) { return -a; }, T, T>();
  table["abs." + type] = lanewise<[](T a) { return std::abs(a); }, T, T>();
  table["copysign." + type] = lanewise<[](T a, T b) { return std::copysign(b, a); }, T, T, T>();
}

// Returns the upper half of the reciprocal: a first approximation to 20 bits, which the code after it refines.
double guess_reciprocal(double a) {
  const double exact = 1.0 / a;
  if (exact != exact || std::isinf(exact) || std::abs(exact) < std::numeric_limits<double>::min()) {
    return exact != exact || std::isinf(exact) ? exact : std::copysign(0.0, exact);
  }
  return std::bit_cast<double>(std::bit_cast<uint64_t>(exact) & 0xffffffff00000000u);
}

template <typename T>
void add_comparisons(Table& table, const std::string& type, bool with_unordered) {
  const auto add = [&]<auto kCompare>(const std::string& name) {
    table["setp." + name + "." + type] = lanewise<kCompare, Predicate, T, T>();
  };
  add.template operator()<([](T a, T b) { return a == b; })>("eq");
  // Comparisons of floating-point numbers; unlike in C++, they are false if either number is NaN.
  add.template operator()<([](T a, T b) { return a < b || a > b; })>("ne");
  add.template operator()<([](T a, T b) { return a < b; })>("lt");
  add.template operator()<([](T a, T b) { return a <= b; })>("le");
  add.template operator()<([](T a, T b) { return a > b; })>("gt");
  add.template operator()<([](T a, T b) { return a >= b; })>("ge");
  if (!with_unordered) return;
  add.template operator()<([](T a, T b) { return !(a < b || a > b); })>("equ");
  add.template operator()<([](T a, T b) { return !(a == b); })>("neu");
  add.template operator()<([](T a, T b) { return !(a >= b); })>("ltu");
  add.template operator()<([](T a, T b) { return !(a > b); })>("leu");
  add.template operator()<([](T a, T b) { return !(a <= b); })>("gtu");
  add.template operator()<([](T a, T b) { return !(a < b); })>("geu");
  add.template operator()<([](T a, T b) { return a == a && b == b; })>("num");
  add.template operator()<([](T a, T b) { return a != a || b != b; })>("nan");
}

}  // namespace

void add_float(Table& table) {
  add_arithmetic<float>(table, "f32");
  add_arithmetic<double>(table, "f64");
  table["rcp.approx.ftz.f64"] = lanewise<guess_reciprocal, double, double>();
}

void add_comparison(Table& table) {
  add_comparisons<float>(table, "f32", true);
  add_comparisons<double>(table, "f64", true);
  add_comparisons<int16_t>(table, "s16", false);
  add_comparisons<uint16_t>(table, "u16", false);
  add_comparisons<int32_t>(table, "s32", false);
  add_comparisons<uint32_t>(table, "u32", false);
  add_comparisons<int64_t>(table, "s64", false);
  add_comparisons<uint64_t>(table, "u64", false);
  table["setp.eq.b16"] = table["setp.eq.u16"], table["setp.ne.b16"] = table["setp.ne.u16"];
  table["setp.eq.b32"] = table["setp.eq.u32"], table["setp.ne.b32"] = table["setp.ne.u32"];
  table["setp.eq.b64"] = table["setp.eq.u64"], table["setp.ne.b64"] = table["setp.ne.u64"];
}

}  // namespace pymoe::ptx
