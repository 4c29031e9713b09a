// ldmatrix and mma.sync, written from the PTX ISA's pictures of fragments ("Matrix fragments for mma.m16n8k16",
// "ldmatrix"): lane 4 g + t, with g = 0 .. 7 and t = 0 .. 3.
#include <cmath>
#include <cstring>

#include "cuda_ptx/access.h"

namespace pymoe::ptx {
namespace {

constexpr int kSide = 8;  // of the matrices that ldmatrix loads

// Lane 8 i + r gives the address of row r of matrix i: eight elements of 16 bits. Lane 4 g + t gets elements 2 t and
// 2 t + 1 of row g of each matrix, the first in the lower half; with .trans of column g.
template <bool kTransposed>
void load_matrices(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int count = instruction.count;
  uint16_t matrix[4][kSide][kSide];
  for_lanes_checked(lanes & (count == 4 ? ~0u : (1u << (kSide * count)) - 1), [&](int lane) {
    const uint64_t address = address_of(warp, instruction, lane, count);
    std::memcpy(matrix[lane / kSide][lane % kSide],
                access(warp, instruction, lane, address, 2 * kSide, Space::kShared, Purpose::kRead), 2 * kSide);
  });
  for (int i = 0; i < count; ++i) {
    for_lanes(lanes, [&](int lane) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t low = kTransposed ? matrix[i][2 * t][g] : matrix[i][g][2 * t];
      const uint32_t high = kTransposed ? matrix[i][2 * t + 1][g] : matrix[i][g][2 * t + 1];
      warp.at<uint32_t>(instruction.at[i])[lane] = low | high << 16;
    });
  }
}

double from_bfloat(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
double from_half(uint32_t bits) {
  const int exponent = bits >> 10 & 31;
  const double sign = bits & 0x8000 ? -1 : 1, fraction = bits & 1023;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

// D (16 x 8) = A (16 x 16) B (16 x 8) + C. Operands: D[0..3], A[0..3], B[0..1], C[0..3].
//   A[i]: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next.   B[i]: rows 2 t + 8 i and the next, column g.
//   C[i], D[i]: row g + 8 (i / 2), column 2 t + i % 2.
// Products are exact, as on the GPU. It is not documented how a GPU rounds their sum: here it is rounded once, from
// double.
template <auto kWiden>
void multiply(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  double a[16][16], b[16][8], c[16][8];
  const auto operand = [&](int number, int lane) { return warp.at<uint32_t>(instruction.at[number])[lane]; };
  for_lanes(lanes, [&](int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = operand(4 + i, lane);
      const int row = g + 8 * (i % 2), column = 2 * t + 8 * (i / 2);
      a[row][column] = kWiden(pair & 0xffff);
      a[row][column + 1] = kWiden(pair >> 16);
    }
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = operand(8 + i, lane);
      b[2 * t + 8 * i][g] = kWiden(pair & 0xffff);
      b[2 * t + 8 * i + 1][g] = kWiden(pair >> 16);
    }
    for (int i = 0; i < 4; ++i) c[g + 8 * (i / 2)][2 * t + i % 2] = std::bit_cast<float>(operand(10 + i, lane));
  });
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for_lanes(lanes, [&](int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      warp.at<float>(instruction.at[i])[lane] = static_cast<float>(c[g + 8 * (i / 2)][2 * t + i % 2]);
    }
  });
}

}  // namespace

bool decode_matrix(const Statement& statement, Decoder& decoder, Instruction& to) {
  const auto& opcode = statement.opcode;
  const auto parts = parts_of(opcode);
  const auto& operands = statement.operands;
  if (parts[0] == "ldmatrix") {
    // ldmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16
    const bool transposed = parts.size() > 5 && parts[5] == "trans";
    if (parts.size() < 7 || parts[1] != "sync" || parts[3] != "m8n8" ||
        !parts[6 + transposed - 1].starts_with("shared") || parts.back() != "b16") {
      return false;
    }
    to.count = static_cast<uint8_t>(operands.at(0).items.size());
    if (parts[4] != "x" + std::to_string(to.count)) throw Error("a wrong number of registers");
    for (int i = 0; i < to.count; ++i) to.at[i] = decoder.result(operands[0].items[static_cast<size_t>(i)], 4);
    decoder.address(operands.at(1), to, to.count);
    to.run = transposed ? load_matrices<true> : load_matrices<false>;
  } else if (opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" ||
             opcode == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") {
    int number = 0;
    constexpr size_t kCounts[] = {4, 4, 2, 4};
    for (size_t i = 0; i < 4; ++i) {
      if (operands.at(i).items.size() != kCounts[i]) throw Error("a wrong number of registers");
      for (const auto& item : operands[i].items) {
        to.at[number++] = i == 0 ? decoder.result(item, 4) : decoder.source(item, 4);
      }
    }
    to.run = opcode.find("bf16") == std::string::npos ? multiply<from_half> : multiply<from_bfloat>;
  } else {
    return false;
  }
  to.kind = Instruction::kAlignedWarp;
  return true;
}

}  // namespace pymoe::ptx
