// Integer arithmetic, bits and moves. PTX registers have a width and no sign; the instruction has the sign.
#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "cuda_ptx/table.h"

namespace pymoe::ptx {
namespace {

template <typename T>
using Unsigned = std::make_unsigned_t<T>;

// The type that is twice as wide, with the same signedness.
template <typename T>
struct WideOf;
template <>
struct WideOf<int16_t> {
  using type = int32_t;
};
template <>
struct WideOf<uint16_t> {
  using type = uint32_t;
};
template <>
struct WideOf<int32_t> {
  using type = int64_t;
};
template <>
struct WideOf<uint32_t> {
  using type = uint64_t;
};
template <>
struct WideOf<int64_t> {
  using type = __int128;
};
template <>
struct WideOf<uint64_t> {
  using type = unsigned __int128;
};
template <typename T>
using Wide = typename WideOf<T>::type;

template <typename T>
T add(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <typename T>
T subtract(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
template <typename T>
T multiply(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <typename T>
T multiply_high(T a, T b) {
  return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T)));
}
// Division by zero gives all ones, and its remainder is the dividend. The ISA leaves these results open; GPUs give
// them.
template <typename T>
T divide(T a, T b) {
  if (b == 0) return static_cast<T>(~T{0});
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return subtract<T>(0, a);
  }
  return static_cast<T>(a / b);
}
template <typename T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return 0;
  }
  return static_cast<T>(a % b);
}

template <typename T>
void add_arithmetic(Table& table, const std::string& type) {
  table["add." + type] = lanewise<add<T>, T, T, T>();
  table["sub." + type] = lanewise<subtract<T>, T, T, T>();
  table["mul.lo." + type] = lanewise<multiply<T>, T, T, T>();
  table["mul.hi." + type] = lanewise<multiply_high<T>, T, T, T>();
  table["mad.lo." + type] = lanewise<[](T a, T b, T c) { return add<T>(multiply<T>(a, b), c); }, T, T, T, T>();
  table["mad.hi." + type] = lanewise<[](T a, T b, T c) { return add<T>(multiply_high<T>(a, b), c); }, T, T, T, T>();
  table["div." + type] = lanewise<divide<T>, T, T, T>();
  table["rem." + type] = lanewise<remainder<T>, T, T, T>();
  table["min." + type] = lanewise<[](T a, T b) { return std::min(a, b); }, T, T, T>();
  table["max." + type] = lanewise<[](T a, T b) { return std::max(a, b); }, T, T, T>();
  // A shift by more places than the type has shifts everything out; a signed type is filled with its sign.
  constexpr uint32_t kBits = 8 * sizeof(T);
  table["shr." + type] = lanewise<[](T a, uint32_t n) {
    if (n >= kBits) return static_cast<T>(a < 0 ? -1 : 0);
    return static_cast<T>(a >> n);
  },
                                  T, T, uint32_t>();
  if constexpr (std::is_signed_v<T>) {
    table["neg." + type] = lanewise<[](T a) { return subtract<T>(0, a); }, T, T>();
    table["abs." + type] = lanewise<[](T a) { return a < 0 ? subtract<T>(0, a) : a; }, T, T>();
  }
  if constexpr (sizeof(T) < 8) {
    using W = Wide<T>;
    table["mul.wide." + type] = lanewise<[](T a, T b) { return multiply<W>(a, b); }, W, T, T>();
    table["mad.wide." + type] = lanewise<[](T a, T b, W c) { return add<W>(multiply<W>(a, b), c); }, W, T, T, W>();
  }
}

template <typename T>
void add_bitwise(Table& table, const std::string& type) {
  table["and." + type] = lanewise<[](T a, T b) { return static_cast<T>(a & b); }, T, T, T>();
  table["or." + type] = lanewise<[](T a, T b) { return static_cast<T>(a | b); }, T, T, T>();
  table["xor." + type] = lanewise<[](T a, T b) { return static_cast<T>(a ^ b); }, T, T, T>();
  table["not." + type] = lanewise<[](T a) { return static_cast<T>(~a); }, T, T>();
  constexpr uint32_t kBits = 8 * sizeof(T);
  table["shl." + type] =
      lanewise<[](T a, uint32_t n) { return static_cast<T>(n >= kBits ? 0 : a << n); }, T, T, uint32_t>();
  table["shr." + type] =
      lanewise<[](T a, uint32_t n) { return static_cast<T>(n >= kBits ? 0 : a >> n); }, T, T, uint32_t>();
}

// Returns the field of `length` bits from `begin`; both are taken modulo 256, and bits past the end are missing.
template <typename T>
T field_mask(uint32_t begin, uint32_t length) {
  begin &= 255, length &= 255;
  constexpr uint32_t kBits = 8 * sizeof(T);
  if (begin >= kBits || length == 0) return 0;
  const T ones = length >= kBits ? ~T{0} : static_cast<T>((T{1} << length) - 1);
  return static_cast<T>(ones << begin);
}

template <typename T>
T insert_field(T a, T b, uint32_t begin, uint32_t length) {
  const T mask = field_mask<T>(begin, length);
  return mask == 0 ? b : static_cast<T>((b & ~mask) | ((a << (begin & 255)) & mask));
}

template <typename T>
T extract_unsigned(T a, uint32_t begin, uint32_t length) {
  const T mask = field_mask<T>(begin, length);
  return mask == 0 ? 0 : static_cast<T>((a & mask) >> (begin & 255));
}

// The sign is the field's highest bit, or the highest bit that exists.
template <typename T>
T extract_signed(T a, uint32_t begin, uint32_t length) {
  begin &= 255, length &= 255;
  constexpr uint32_t kBits = 8 * sizeof(T);
  if (length == 0) return 0;
  const bool negative = a >> std::min(begin + length - 1, kBits - 1) & 1;
  T found = extract_unsigned<T>(a, begin, length);
  for (uint32_t i = begin >= kBits ? 0 : std::min(length, kBits - begin); i < kBits && negative; ++i)
    found |= T{1} << i;
  return found;
}

// Byte n of the result is byte (selector >> 4n) & 7 of b:a, or its sign if bit 3 of the selector's digit is set.
uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (digit & 7)) & 255;
    if (digit & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// Bit i of the result is bit 4 a + 2 b + c of the table, of the operands' bits i.
uint32_t look_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

uint32_t funnel(uint32_t low, uint32_t high, uint32_t n, bool left) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(left ? both << n >> 32 : both >> n);
}

template <typename T>
void add_moves(Table& table, const std::string& type) {
  table["mov." + type] = lanewise<[](T a) { return a; }, T, T>();
  table["selp." + type] = lanewise<[](T a, T b, bool p) { return p ? a : b; }, T, T, T, Predicate>();
}

template <typename T>
void add_counts(Table& table, const std::string& type) {
  table["popc." + type] = lanewise<[](T a) { return static_cast<uint32_t>(std::popcount(a)); }, uint32_t, T>();
  table["clz." + type] = lanewise<[](T a) { return static_cast<uint32_t>(std::countl_zero(a)); }, uint32_t, T>();
  table["brev." + type] = lanewise<[](T a) {
    T reversed = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) reversed = static_cast<T>(reversed << 1 | (a >> i & 1));
    return reversed;
  },
                                   T, T>();
  table["bfi." + type] = lanewise<insert_field<T>, T, T, T, uint32_t, uint32_t>();
}

}  // namespace

void add_integer(Table& table) {
  add_arithmetic<int16_t>(table, "s16");
  add_arithmetic<uint16_t>(table, "u16");
  add_arithmetic<int32_t>(table, "s32");
  add_arithmetic<uint32_t>(table, "u32");
  add_arithmetic<int64_t>(table, "s64");
  add_arithmetic<uint64_t>(table, "u64");
}

void add_bits(Table& table) {
  add_bitwise<uint16_t>(table, "b16");
  add_bitwise<uint32_t>(table, "b32");
  add_bitwise<uint64_t>(table, "b64");
  for (const char* letter : {"b", "u", "s", "f"}) {
    add_moves<uint16_t>(table, std::string(letter) + "16");
    add_moves<uint32_t>(table, std::string(letter) + "32");
    add_moves<uint64_t>(table, std::string(letter) + "64");
  }
  table["mov.pred"] = lanewise<[](bool a) { return a; }, Predicate, Predicate>();
  table["not.pred"] = lanewise<[](bool a) { return !a; }, Predicate, Predicate>();
  table["and.pred"] = lanewise<[](bool a, bool b) { return a && b; }, Predicate, Predicate, Predicate>();
  table["or.pred"] = lanewise<[](bool a, bool b) { return a || b; }, Predicate, Predicate, Predicate>();
  table["xor.pred"] = lanewise<[](bool a, bool b) { return a != b; }, Predicate, Predicate, Predicate>();

  add_counts<uint32_t>(table, "b32");
  add_counts<uint64_t>(table, "b64");
  table["bfe.u32"] = lanewise<extract_unsigned<uint32_t>, uint32_t, uint32_t, uint32_t, uint32_t>();
  table["bfe.u64"] = lanewise<extract_unsigned<uint64_t>, uint64_t, uint64_t, uint32_t, uint32_t>();
  table["bfe.s32"] = lanewise<extract_signed<uint32_t>, uint32_t, uint32_t, uint32_t, uint32_t>();
  table["bfe.s64"] = lanewise<extract_signed<uint64_t>, uint64_t, uint64_t, uint32_t, uint32_t>();
  table["bfind.u32"] =
      lanewise<[](uint32_t a) { return a == 0 ? ~0u : static_cast<uint32_t>(31 - std::countl_zero(a)); }, uint32_t,
               uint32_t>();
  table["bfind.u64"] =
      lanewise<[](uint64_t a) { return a == 0 ? ~0u : static_cast<uint32_t>(63 - std::countl_zero(a)); }, uint32_t,
               uint64_t>();
  table["prmt.b32"] = lanewise<permute, uint32_t, uint32_t, uint32_t, uint32_t>();
  table["lop3.b32"] = lanewise<look_up, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>();
  // wrap: n modulo 32; clamp: at most 32.
  table["shf.l.wrap.b32"] = lanewise<[](uint32_t a, uint32_t b, uint32_t n) { return funnel(a, b, n & 31, true); },
                                     uint32_t, uint32_t, uint32_t, uint32_t>();
  table["shf.r.wrap.b32"] = lanewise<[](uint32_t a, uint32_t b, uint32_t n) { return funnel(a, b, n & 31, false); },
                                     uint32_t, uint32_t, uint32_t, uint32_t>();
  table["shf.l.clamp.b32"] =
      lanewise<[](uint32_t a, uint32_t b, uint32_t n) { return funnel(a, b, std::min(n, 32u), true); }, uint32_t,
               uint32_t, uint32_t, uint32_t>();
  table["shf.r.clamp.b32"] =
      lanewise<[](uint32_t a, uint32_t b, uint32_t n) { return funnel(a, b, std::min(n, 32u), false); }, uint32_t,
               uint32_t, uint32_t, uint32_t>();

  // A global address is also its generic address; addresses in shared memory get the window's bit.
  const Meaning same = lanewise<[](uint64_t a) { return a; }, uint64_t, uint64_t>();
  table["cvta.to.global.u64"] = table["cvta.global.u64"] = same;
  table["cvta.shared.u64"] = lanewise<[](uint64_t a) { return a | SharedMemory::kWindow; }, uint64_t, uint64_t>();
  table["cvta.to.shared.u64"] = lanewise<[](uint64_t a) { return a & ~SharedMemory::kWindow; }, uint64_t, uint64_t>();
  // Returns the same place in the cluster's block of the given rank.
  constexpr auto kMap = []<typename T>(T a, uint32_t rank) {
    const auto window = static_cast<T>(a & static_cast<T>(SharedMemory::kWindow));
    return static_cast<T>(window | (a & SharedMemory::kPlace) | static_cast<T>(rank + 1) << SharedMemory::kRankShift);
  };
  table["mapa.u64"] = lanewise<kMap, uint64_t, uint64_t, uint32_t>();
  table["mapa.shared::cluster.u64"] = table["mapa.u64"];
  table["mapa.shared::cluster.u32"] = lanewise<kMap, uint32_t, uint32_t, uint32_t>();
}

}  // namespace pymoe::ptx
