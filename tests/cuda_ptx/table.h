// The table of instructions that every lane executes by itself. It is filled from ordinary functions:
//
//     table.add("add.s32", lanewise<[](uint32_t a, uint32_t b) { return a + b; }, uint32_t, uint32_t, uint32_t>());
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_ptx/machine.h"

namespace pymoe::ptx {

// Stands for a predicate among the types of operands.
struct Predicate {};

template <typename T>
inline constexpr int kWidth = static_cast<int>(sizeof(T));
template <>
inline constexpr int kWidth<Predicate> = 0;

struct Meaning {
  Function run = nullptr;
  std::vector<int> widths;  // widths of the operands, the result first; 0 means a predicate
};

using Table = std::unordered_map<std::string, Meaning>;

template <typename T>
inline auto value_of(const Warp& warp, uint32_t place, int lane) {
  if constexpr (std::is_same_v<T, Predicate>) {
    return (warp.predicate(place) >> lane & 1) != 0;
  } else {
    return warp.at<T>(place)[lane];
  }
}

// result = f(operands...)
template <auto kFunction, typename Result, typename... Operands>
Meaning lanewise() {
  return {[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
            [&]<size_t... kNumber>(std::index_sequence<kNumber...>) {
              if constexpr (std::is_same_v<Result, Predicate>) {
                uint32_t bits = 0;
                for_lanes(lanes, [&](int lane) {
                  const bool bit = kFunction(value_of<Operands>(warp, instruction.at[1 + kNumber], lane)...);
                  bits |= static_cast<uint32_t>(bit) << lane;
                });
                uint32_t& to = warp.predicate(instruction.at[0]);
                to = (to & ~lanes) | bits;
              } else {
                Result* const to = warp.at<Result>(instruction.at[0]);
                for_lanes(lanes, [&](int lane) {
                  to[lane] = kFunction(value_of<Operands>(warp, instruction.at[1 + kNumber], lane)...);
                });
              }
            }(std::index_sequence_for<Operands...>{});
          },
          {kWidth<Result>, kWidth<Operands>...}};
}

void add_integer(Table& table);
void add_bits(Table& table);
void add_float(Table& table);
void add_comparison(Table& table);
void add_conversion(Table& table);

}  // namespace pymoe::ptx
