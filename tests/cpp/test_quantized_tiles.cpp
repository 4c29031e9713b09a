// Compares quantized_linear by tiles with quantized_linear by vectors, and its fused multiply-adds (fp8 and the affine
// and symmetric formats) with a plain loop, bit for bit; every operand lies between inaccessible pages. Runs emulated
// tiles, and fused multiply-adds, with the loops of every instruction set of the machine, and the processor's tiles.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulated_tiles.h"
#include "guarded.h"
#include "kernels/cpu/amx_tiles.h"
#include "kernels/quantized_linear.h"
#include "kernels/quantized_weight.h"

namespace pymoe::test {

// The arguments of a product: rows of one expert times one tile of its weights.
template <typename T>
struct TileCall {
  const uint8_t* tile;
  const T* x;  // (rows, inputs)
  int64_t rows;
  int64_t inputs;
  const T* bias;  // may be null
  T* out;
  int64_t row_stride;
  int64_t count;  // number of outputs
};

}  // namespace pymoe::test

#define PYMOE_ISA_BODY "quantized_checks_body.h"
#define PYMOE_ISA_BF16
#define PYMOE_ISA_DOTPROD
#include "kernels/cpu/for_each_isa.h"

namespace {

using namespace pymoe;
using cpu::Isa;
using test::EmulatedTiles;
using test::Guarded;
using test::TileCall;
using enum pymoe::WeightFormat;

template <typename T>
struct Variant {
  const char* name;
  void (*run)(const TileCall<T>&);
};

// Returns the variants that run case number `number`: emulated tiles with one set of instructions, and real tiles.
template <WeightFormat kFormat, typename T>
std::vector<Variant<T>> variants(int number) {
  std::vector<Variant<T>> found = {{"emulated, baseline", &cpu::baseline::by_tiles<kFormat, T, EmulatedTiles>}};
  [[maybe_unused]] const Isa best = cpu::best_isa();
#if PYMOE_MULTIVERSION
  if (best >= Isa::kV3) found.push_back({"emulated, v3", &cpu::v3::by_tiles<kFormat, T, EmulatedTiles>});
  if (best >= Isa::kV4) found.push_back({"emulated, v4", &cpu::v4::by_tiles<kFormat, T, EmulatedTiles>});
  if (best >= Isa::kV4Bf16) found.push_back({"emulated, v4_bf16", &cpu::v4_bf16::by_tiles<kFormat, T, EmulatedTiles>});
  found = {found[static_cast<size_t>(number) % found.size()]};
  if (best >= Isa::kV4Bf16) found.push_back({"vectors, v4_bf16", &cpu::v4_bf16::by_vectors<kFormat, T>});
  if (best >= Isa::kAmx) found.push_back({"amx", &cpu::v4_bf16::by_tiles<kFormat, T, cpu::AmxTiles>});
#elif PYMOE_NEON
  if (best >= Isa::kDotProd) found.push_back({"vectors, dotprod", &cpu::dotprod::by_vectors<kFormat, T>});
  if (best == Isa::kI8mm) found.push_back({"vectors, i8mm", &cpu::i8mm::by_vectors<kFormat, T>});
#endif
  return found;
}

template <typename T>
bool same(T a, T b) {
  const float wide = to_accumulate(a), other = to_accumulate(b);
  return memcmp(&a, &b, sizeof(T)) == 0 || (std::isnan(wide) && std::isnan(other));
}

enum class Values { kUsual, kSpecial, kLargest };

template <typename T>
void fill_rows(std::mt19937& random, Values values, int64_t inputs, Guarded<T>& x) {
  for (int64_t i = 0; i < x.size(); ++i) {
    const auto uniform = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f;
    float value = std::ldexp(uniform, static_cast<int>(i / std::max<int64_t>(1, inputs) % 7) * 9 - 27);
    if (values == Values::kLargest) value = random() % 64 == 0 ? -32639.0f : 32639.0f;
    if (values == Values::kSpecial && random() % 512 == 0) {
      const float some[] = {std::nanf(""), std::numeric_limits<float>::infinity(), -3e38f, 1e-40f, -0.0f};
      value = some[random() % 5];
    }
    x[i] = round_to<T>(value);
  }
}

// Uses random bytes as codes: all values occur, even those that quantize_weight never writes.
template <WeightFormat kFormat>
void fill_tile(std::mt19937& random, Values values, int64_t inputs, Guarded<uint8_t>& tile) {
  for (int64_t i = 0; i < tile.size(); ++i) {
    tile[i] = values == Values::kLargest ? 255 : static_cast<uint8_t>(random());
  }
  if (is_fused(kFormat) && kFormat != kFp8) {  // scales and offsets are usual, or any bits in special rows
    const int64_t heads = fused_head_bytes(kFormat) / 4;
    const int64_t runs = (quantized_groups(inputs) * kQuantizedGroup + fused_run(kFormat) - 1) / fused_run(kFormat);
    for (int64_t i = 0; i < runs * heads; ++i) {
      uint8_t* head = tile.data() + i / heads * fused_run_bytes(kFormat);
      const float end = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-40f;
      if (values != Values::kSpecial) memcpy(head + i % heads * 4, &end, sizeof(end));
    }
    return;
  }
  if (kFormat == WeightFormat::kFp8) {  // padding has no NaN; scales are usual, or any bits in special rows
    for (int64_t i = 0; i < tile.size(); ++i) {
      if ((tile[i] & 127) == 127 && values != Values::kSpecial) tile[i] = 1;
    }
    for (int64_t block = 0; block < fp8_blocks(inputs); ++block) {
      uint8_t* begin = tile.data() + fused_begin(kFp8, block * kFp8Block);
      for (int64_t j = 0; j < kQuantizedTile; ++j) {
        const float scale = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-40f;
        if (values != Values::kSpecial) memcpy(begin + 4 * j, &scale, sizeof(scale));
      }
      const int64_t rest = inputs - block * kFp8Block, end = quantized_groups(rest) * kQuantizedGroup;
      for (int64_t i = rest * kQuantizedTile; rest < kFp8Block && i < end * kQuantizedTile; ++i) {
        begin[4 * kQuantizedTile + i] = 0;
      }
    }
    return;
  }
  if (kFormat == WeightFormat::kInt8) {
    for (int64_t j = 0; j < kQuantizedTile; ++j) {
      const float scale = static_cast<float>(random() % 1000) * 1e-3f;
      memcpy(tile.data() + 4 * j, &scale, sizeof(scale));
    }
    return;
  }
  if (kFormat == WeightFormat::kInt4) {  // integers of 6 bits are any
    for (int64_t j = 0; j < kQuantizedTile; ++j) {
      tile[j] = static_cast<uint8_t>(values == Values::kSpecial ? random() : 110 + random() % 30);
    }
    const int64_t whole = quantized_super_bytes(kFormat) + kSuperGroups * quantized_group_bytes(kFormat);
    for (int64_t super = quantized_head_bytes(kFormat); super < tile.size(); super += whole) {
      for (int64_t j = 0; j < 2 * kQuantizedTile; ++j) {
        const auto factor = static_cast<uint16_t>(
            values == Values::kSpecial ? random() : (random() & (j < kQuantizedTile ? 0xfff : 0x8fff)) + 0x1000);
        memcpy(tile.data() + super + 2 * j, &factor, sizeof(factor));
      }
    }
    return;
  }
  for (int64_t group = 0; group < quantized_groups(inputs); ++group) {
    // All scales that quantize_weight writes; in special rows, all scales that exist.
    uint8_t* scales = tile.data() + group * quantized_group_bytes(kFormat);
    for (int64_t j = 0; j < kQuantizedTile; ++j) {
      scales[j] = static_cast<uint8_t>(values == Values::kSpecial   ? random()
                                       : values == Values::kLargest ? 127
                                                                    : 110 + random() % 30);
    }
  }
}

// The value by which an input is multiplied, before the scale of its block at fp8.
template <WeightFormat kFormat>
float value_of(const uint8_t* tile, int64_t input, int64_t output) {
  const uint8_t* run = tile + fused_begin(kFormat, input);
  const uint8_t* codes = run + fused_head_bytes(kFormat);
  const int64_t i = input % fused_run(kFormat);
  if constexpr (kFormat == kFp8) {
    const int code = codes[i * kQuantizedTile + output], exponent = code >> 3 & 15, mantissa = code & 7;
    const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                      : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (code & 127) == 127 ? std::nanf("") : code < 128 ? value : -value;
  }
  if constexpr (kFormat == kSymmetric8) {
    float scale;
    memcpy(&scale, run + 4 * output, sizeof(scale));
    return static_cast<float>(static_cast<int8_t>(codes[i * kQuantizedTile + output])) * scale;
  }
  constexpr int64_t kBits = bits_of(kFormat), kTogether = 8 / kBits;
  const int code = codes[i / kTogether * kQuantizedTile + output] >> i % kTogether * kBits & ((1 << kBits) - 1);
  float scale, offset;
  memcpy(&scale, run + 4 * output, sizeof(scale));
  memcpy(&offset, run + 4 * (kQuantizedTile + output), sizeof(offset));
  return std::fma(static_cast<float>(code), scale, offset);
}

// Products by fused multiply-adds as quantized_linear.h describes them. Padding of inputs is multiplied by zeros.
template <WeightFormat kFormat, typename T>
void multiply_one_by_one(const TileCall<T>& call) {
  for (int64_t r = 0; r < call.rows; ++r) {
    for (int64_t j = 0; j < call.count; ++j) {
      float y = 0;
      const int64_t padded = quantized_groups(call.inputs) * kQuantizedGroup;
      for (int64_t block = 0; block < padded; block += kRoundedInputs) {
        float sum = 0, scale = 1;
        if (kFormat == kFp8) memcpy(&scale, call.tile + fused_begin(kFp8, block) + 4 * j, sizeof(scale));
        for (int64_t i = block; i < std::min(padded, block + kRoundedInputs); ++i) {
          const float x = i < call.inputs ? to_accumulate(call.x[r * call.inputs + i]) : 0.0f;
          sum = std::fma(x, value_of<kFormat>(call.tile, i, j), sum);
        }
        y = y + sum * scale;
      }
      if (call.bias != nullptr) y = y + to_accumulate(call.bias[j]);
      call.out[r * call.row_stride + j] = round_to<T>(y);
    }
  }
}

// Every instruction set of the machine, and no tiles.
template <WeightFormat kFormat, typename T>
std::vector<Variant<T>> variants_without_tiles() {
  std::vector<Variant<T>> found = {{"baseline", &cpu::baseline::by_vectors<kFormat, T>}};
  [[maybe_unused]] const Isa best = cpu::best_isa();
#if PYMOE_MULTIVERSION
  if (best >= Isa::kV3) found.push_back({"v3", &cpu::v3::by_vectors<kFormat, T>});
  if (best >= Isa::kV4) found.push_back({"v4", &cpu::v4::by_vectors<kFormat, T>});
  if (best >= Isa::kV4Bf16) found.push_back({"v4_bf16", &cpu::v4_bf16::by_vectors<kFormat, T>});
#elif PYMOE_NEON
  if (best >= Isa::kDotProd) found.push_back({"vectors, dotprod", &cpu::dotprod::by_vectors<kFormat, T>});
  if (best == Isa::kI8mm) found.push_back({"vectors, i8mm", &cpu::i8mm::by_vectors<kFormat, T>});
#endif
  return found;
}

template <WeightFormat kFormat, typename T>
void judge(std::mt19937& random, int64_t rows, int64_t inputs, int64_t count, Values values) {
  Guarded<T> x(rows * inputs, true), bias(count, true);
  Guarded<uint8_t> tile(quantized_tile_bytes(kFormat, inputs), true);
  fill_rows(random, values, inputs, x);
  fill_rows(random, Values::kUsual, 1, bias);
  fill_tile<kFormat>(random, values, inputs, tile);
  const bool biased = random() % 2 == 0;
  const int64_t row_stride = count + static_cast<int64_t>(random() % 3) * 7;
  const int64_t size = rows == 0 ? 0 : (rows - 1) * row_stride + count;
  const T untouched = round_to<T>(-77.0f);
  std::vector<T> expected(static_cast<size_t>(size), untouched);
  TileCall<T> call{tile.data(),     x.data(),   rows, inputs, biased ? bias.data() : nullptr,
                   expected.data(), row_stride, count};
  static int number = 0;
  std::vector<Variant<T>> ways;
  if constexpr (is_fused(kFormat)) {
    multiply_one_by_one<kFormat>(call);
    ways = variants_without_tiles<kFormat, T>();
  } else {
    cpu::baseline::by_vectors<kFormat, T>(call);
    ways = variants<kFormat, T>(number++);
  }
  for (const Variant<T>& variant : ways) {
    CAPTURE(variant.name);
    CAPTURE(bits_of(kFormat));
    CAPTURE(rows);
    CAPTURE(inputs);
    CAPTURE(count);
    const Guarded<T> out(size, true);
    std::fill(out.data(), out.data() + size, untouched);
    call.out = out.data();
    variant.run(call);
    int64_t wrong = 0;
    for (int64_t i = 0; i < size; ++i) wrong += !same(out[i], expected[static_cast<size_t>(i)]);
    CHECK(wrong == 0);
  }
}

template <WeightFormat kFormat, typename T>
void judge_many(unsigned seed, Values values) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  for (int turn = 0; turn < 12; ++turn) {
    judge<kFormat, T>(random, 1 + below(turn % 4 == 0 ? 120 : 35), below(turn % 3 == 0 ? 420 : 140), 1 + below(64),
                      values);
  }
}

}  // namespace

TEST_CASE("quantized_linear by tiles: the bits of vectors, for random rows, inputs and outputs") {
  judge_many<kInt8, float>(1, Values::kUsual);
  judge_many<kInt4, float>(2, Values::kUsual);
  judge_many<kInt8, BFloat16>(3, Values::kUsual);
  judge_many<kInt4, BFloat16>(4, Values::kUsual);
  judge_many<kInt8, Float16>(5, Values::kUsual);
  judge_many<kInt4, Float16>(6, Values::kUsual);
  judge_many<kMxfp4, float>(12, Values::kUsual);
  judge_many<kMxfp4, BFloat16>(13, Values::kUsual);
}

TEST_CASE("quantized_linear by tiles: rows that are not finite are nobody else's") {
  judge_many<kInt8, float>(7, Values::kSpecial);
  judge_many<kInt4, float>(8, Values::kSpecial);
  judge_many<kMxfp4, float>(14, Values::kSpecial);
}

TEST_CASE("quantized_linear by tiles: the largest integers and codes are still added up exactly") {
  judge_many<kInt8, float>(9, Values::kLargest);
  judge_many<kInt4, float>(10, Values::kLargest);
  judge_many<kMxfp4, float>(15, Values::kLargest);
}

TEST_CASE("quantized_linear by tiles: every number of rows that share tiles, and every number of groups") {
  std::mt19937 random(11);
  for (int64_t rows = 1; rows <= 34; ++rows) {
    judge<kInt8, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
    judge<kInt4, float>(random, rows, 32 * (rows % 19), 64, Values::kUsual);
    judge<kMxfp4, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
  }
  for (const int64_t rows : {96, 97, 193}) {  // around the number of rows at which a new block of sums begins
    judge<kInt8, float>(random, rows, 40, 33, Values::kUsual);
    judge<kInt4, float>(random, rows, 40, 33, Values::kUsual);
    judge<kMxfp4, float>(random, rows, 40, 33, Values::kUsual);
  }
}

TEST_CASE("quantized_linear by fused multiply-adds: the bits of a plain loop, for random rows, inputs and outputs") {
  judge_many<kFp8, float>(16, Values::kUsual);
  judge_many<kFp8, BFloat16>(17, Values::kUsual);
  judge_many<kFp8, Float16>(18, Values::kUsual);
  judge_many<kAffine8, float>(22, Values::kUsual);
  judge_many<kAffine8, BFloat16>(23, Values::kUsual);
  judge_many<kAffine4, float>(24, Values::kUsual);
  judge_many<kAffine4, Float16>(25, Values::kUsual);
  judge_many<kAffine2, float>(31, Values::kUsual);
  judge_many<kAffine2, BFloat16>(32, Values::kUsual);
  judge_many<kSymmetric8, float>(28, Values::kUsual);
  judge_many<kSymmetric8, BFloat16>(29, Values::kUsual);
}

TEST_CASE("quantized_linear by fused multiply-adds: NaN, infinities, subnormal numbers, and scales of any bits") {
  judge_many<kFp8, float>(19, Values::kSpecial);
  judge_many<kFp8, BFloat16>(20, Values::kSpecial);
  judge_many<kAffine8, float>(26, Values::kSpecial);
  judge_many<kAffine4, float>(27, Values::kSpecial);
  judge_many<kAffine2, float>(33, Values::kSpecial);
  judge_many<kSymmetric8, float>(30, Values::kSpecial);
}

TEST_CASE(
    "quantized_linear by fused multiply-adds: every number of rows that share registers or values, and of groups") {
  std::mt19937 random(21);
  for (int64_t rows = 1; rows <= 34; ++rows) {
    judge<kFp8, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
    judge<kAffine8, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
    judge<kAffine4, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
    judge<kAffine2, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
    judge<kSymmetric8, float>(random, rows, 32 * (rows % 9), 64, Values::kUsual);
  }
  for (const int64_t rows : {96, 97, 193}) {
    judge<kFp8, float>(random, rows, 40, 33, Values::kUsual);
    judge<kAffine8, float>(random, rows, 40, 33, Values::kUsual);
    judge<kAffine4, float>(random, rows, 40, 33, Values::kUsual);
    judge<kAffine2, float>(random, rows, 40, 33, Values::kUsual);
    judge<kSymmetric8, float>(random, rows, 40, 33, Values::kUsual);
  }
}
