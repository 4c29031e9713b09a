// Compares the gemm of bf16 tiles, bit for bit, with sums in the order that it promises; every operand lies between
// inaccessible pages. Runs emulated tiles with the packs of every instruction set of the machine, and the processor's.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "emulated_tiles.h"
#include "guarded.h"
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/gemm.h"

#define PYMOE_ISA_BODY "amx_checks_body.h"
#define PYMOE_ISA_BF16
#include "kernels/cpu/for_each_isa.h"

namespace {

using namespace pymoe;
using cpu::Gemm;
using cpu::Isa;
using test::Guarded;

struct Variant {
  const char* name;
  void (*run)(const Gemm<BFloat16>&);
};

// Returns the variants that run case number `number`: emulated tiles with one of the sets in turn, and real tiles.
std::vector<Variant> variants(int number) {
  std::vector<Variant> found = {{"emulated, baseline", &cpu::baseline::gemm_by_emulated_tiles}};
#if PYMOE_MULTIVERSION
  const Isa best = cpu::best_isa();
  if (best >= Isa::kV3) found.push_back({"emulated, v3", &cpu::v3::gemm_by_emulated_tiles});
  if (best >= Isa::kV4) found.push_back({"emulated, v4", &cpu::v4::gemm_by_emulated_tiles});
  if (best >= Isa::kV4Bf16) found.push_back({"emulated, v4_bf16", &cpu::v4_bf16::gemm_by_emulated_tiles});
  found = {found[static_cast<size_t>(number) % found.size()]};
  if (best >= Isa::kAmx) found.push_back({"amx", &cpu::v4_bf16::gemm_by_tiles});
#endif
  return found;
}

bool is_nan(BFloat16 value) { return (value.bits & 0x7fff) > 0x7f80; }
bool same(BFloat16 a, BFloat16 b) { return a.bits == b.bits || (is_nan(a) && is_nan(b)); }

// Returns an element of C as gemm_amx.h promises it.
BFloat16 expected(const Gemm<BFloat16>& g, int64_t i, int64_t j) {
  float sum = 0;
  for (int64_t p = 0; p < g.k; p += 32) {
    const auto place = [&](int64_t q) { return cpu::place_of(g.steps, p + q); };
    sum = test::add_tile(
        sum,
        [&](int64_t q) {
          return p + q < g.k ? g.a[cpu::place_of(g.rows, i) * g.a_row_stride + place(q) * g.a_column_stride]
                             : BFloat16{0};
        },
        [&](int64_t q) { return p + q < g.k ? g.b[place(q) * g.b_row_stride + j * g.b_column_stride] : BFloat16{0}; });
  }
  return round_to<BFloat16>(test::flushed((g.bias == nullptr ? 0 : to_accumulate(g.bias[j * g.bias_stride])) + sum));
}

class Case {
 public:
  enum class Layout { kAlongK, kAcross, kStrided };

  // With `orders` an order picks the rows of A and C, or the steps of k, from three more than are used.
  Case(std::mt19937& random, int64_t m, int64_t n, int64_t k, Layout a, Layout b, bool orders, bool bias, bool special)
      : random_(random), special_(special) {
    const bool of_rows = orders && a == Layout::kAlongK;
    const bool of_steps = orders && a == Layout::kAcross && b == Layout::kAcross;
    const int64_t rows = m + (of_rows ? 3 : 0), steps = k + (of_steps ? 3 : 0);
    g.m = m, g.n = n, g.k = k;
    const int64_t pad = below(3) == 0 ? 0 : below(40);
    std::tie(g.a_row_stride, g.a_column_stride) = strides(a, rows, steps, pad);
    std::tie(g.b_column_stride, g.b_row_stride) = strides(b, n, steps, below(2) == 0 ? 0 : pad);
    a_ = fill(extent(rows, g.a_row_stride, steps, g.a_column_stride));
    b_ = fill(extent(n, g.b_column_stride, steps, g.b_row_stride));
    g.bias_stride = 1 + below(2);
    if (bias) bias_ = fill(extent(n, g.bias_stride, 1, 1));
    g.c_row_stride = n + below(3) * 5;
    c_size_ = extent(rows, g.c_row_stride, n, 1);
    g.leaves_cache = below(2) == 0;
    g.a = a_->data(), g.b = b_->data(), g.bias = bias ? bias_->data() : nullptr;
    const int64_t places = of_rows ? rows : of_steps ? steps : 0;
    order_.resize(static_cast<size_t>(places));
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), random_);
    if (of_rows) g.rows = order_.data();
    if (of_steps) g.steps = order_.data();
  }

  // Returns how many elements are wrong, including those in C's memory that do not belong to C.
  int64_t wrong(const Variant& variant) {
    constexpr BFloat16 kUntouched{0x1234};
    const Guarded<BFloat16> c(c_size_, below(2) == 0);
    std::fill(c.data(), c.data() + c_size_, kUntouched);
    g.c = c.data();
    variant.run(g);
    if (expected_.empty()) {
      expected_.assign(static_cast<size_t>(c_size_), kUntouched);
      for (int64_t i = 0; i < g.m; ++i) {
        for (int64_t j = 0; j < g.n; ++j) {
          expected_[static_cast<size_t>(cpu::place_of(g.rows, i) * g.c_row_stride + j)] = expected(g, i, j);
        }
      }
    }
    int64_t count = 0;
    for (int64_t i = 0; i < c_size_; ++i) count += !same(c[i], expected_[static_cast<size_t>(i)]);
    return count;
  }

  Gemm<BFloat16> g{};

 private:
  int64_t below(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(end)); }

  // Returns the stride of an item and the stride of a step of k.
  std::pair<int64_t, int64_t> strides(Layout layout, int64_t items, int64_t steps, int64_t pad) {
    if (layout == Layout::kAlongK) return {steps + pad, 1};
    if (layout == Layout::kAcross) return {1, items + pad};
    return {2 * steps + pad, 2};
  }

  static int64_t extent(int64_t a, int64_t a_stride, int64_t b, int64_t b_stride) {
    return a == 0 || b == 0 ? 0 : (a - 1) * a_stride + (b - 1) * b_stride + 1;
  }

  std::unique_ptr<Guarded<BFloat16>> fill(int64_t count) {
    auto values = std::make_unique<Guarded<BFloat16>>(count, below(2) == 0);
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = static_cast<uint16_t>(random_());
      // arbitrary bits, or numbers whose magnitude is between 1/4 and 4
      (*values)[i] = {special_ && below(8) == 0 ? bits : static_cast<uint16_t>((bits & 0x81ff) + 0x3e80)};
    }
    return values;
  }

  std::mt19937& random_;
  bool special_;
  std::unique_ptr<Guarded<BFloat16>> a_, b_, bias_;
  std::vector<int32_t> order_;
  std::vector<BFloat16> expected_;
  int64_t c_size_ = 0;
};

void judge(Case&& test) {
  static int number = 0;
  for (const Variant& variant : variants(number++)) {
    CAPTURE(variant.name);
    CAPTURE(test.g.m);
    CAPTURE(test.g.n);
    CAPTURE(test.g.k);
    CAPTURE(test.g.a_column_stride);
    CAPTURE(test.g.b_row_stride);
    CHECK(test.wrong(variant) == 0);
  }
}

using Layout = Case::Layout;
constexpr Layout kLayouts[] = {Layout::kAlongK, Layout::kAcross, Layout::kStrided};

}  // namespace

TEST_CASE("amx gemm: every element of random shapes, layouts, orders and values") {
  std::mt19937 random(1);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  for (int number = 0; number < 120; ++number) {
    const bool many = below(6) == 0;
    const int64_t m = many ? below(201) : below(40), n = many ? below(40) : below(70), k = below(many ? 40 : 100);
    const Layout a = kLayouts[below(3)], b = kLayouts[below(3)];
    judge(Case(random, m, n, k, a, b, below(2) == 0, below(2) == 0, below(3) == 0));
  }
}

TEST_CASE("amx gemm: few rows and columns of B that follow each other") {
  std::mt19937 random(4);
  for (int64_t m = 1; m <= 10; ++m) {
    for (int turn = 0; turn < 4; ++turn) {
      const int64_t n = 1 + static_cast<int64_t>(random() % 130), k = static_cast<int64_t>(random() % 140);
      judge(Case(random, m, n, k, kLayouts[turn % 3], Layout::kAcross, turn == 0, turn % 2 == 0, turn > 1));
    }
  }
}

// Sums that are -0 before their last tile, whose few products are -0, too: they become +0 where the tile also
// multiplies the zeros after these products, which a bias of -0 reveals.
TEST_CASE("amx gemm: the sign of a zero does not depend on the number of rows") {
  const auto power = [](float factor, int exponent) { return round_to<BFloat16>(std::ldexp(factor, exponent)); };
  for (int64_t last = 1; last <= 32; ++last) {  // number of steps in the last tile
    const int64_t k = 64 + last, most = 9, n = 2;
    std::vector<BFloat16> a(static_cast<size_t>(most * k), BFloat16{0}), b(static_cast<size_t>(k * n), power(1, -63));
    for (int64_t i = 0; i < most; ++i) {
      a[static_cast<size_t>(i * k)] = power(-1.5, -63);
      a[static_cast<size_t>(i * k + 32)] = power(1, -63);
      for (int64_t p = 64; p < k; ++p) a[static_cast<size_t>(i * k + p)] = power(-1, -66);
    }
    const std::vector<BFloat16> bias(static_cast<size_t>(n), BFloat16{0x8000});
    for (const int64_t m : {1, 4, 8, 9}) {
      std::vector<BFloat16> c(static_cast<size_t>(m * n));
      const Gemm<BFloat16> g{.a = a.data(),
                             .a_row_stride = k,
                             .a_column_stride = 1,
                             .b = b.data(),
                             .b_row_stride = n,
                             .b_column_stride = 1,
                             .bias = bias.data(),
                             .bias_stride = 1,
                             .c = c.data(),
                             .c_row_stride = n,
                             .m = m,
                             .n = n,
                             .k = k};
      for (int number = 0; number < 4; ++number) {
        for (const Variant& variant : variants(number)) {
          CAPTURE(variant.name);
          CAPTURE(last);
          CAPTURE(m);
          variant.run(g);
          for (const BFloat16 value : c) CHECK(value.bits == expected(g, 0, 0).bits);
        }
      }
    }
  }
}

TEST_CASE("amx gemm: columns that are packed in several chunks, or read where they lie") {
  std::mt19937 random(2);
  for (int turn = 0; turn < 4; ++turn) {
    judge(Case(random, 1 + turn, 1100, 40, Layout::kAlongK, Layout::kAcross, false, true, false));
    judge(Case(random, 17 + turn, 200, 64 + turn, Layout::kAlongK, Layout::kAlongK, true, true, false));
    judge(Case(random, 40 + turn, 100, 64 + turn % 2, Layout::kAlongK, Layout::kAlongK, false, false, false));
  }
}

TEST_CASE("amx gemm: sums that wait for the next block of k, and rows of A that are packed in turns") {
  std::mt19937 random(3);
  for (int turn = 0; turn < 4; ++turn) {
    judge(Case(random, 1 + 18 * (turn % 2), 70, 300 + turn, Layout::kAlongK, Layout::kAcross, false, true, false));
    judge(Case(random, 2, 3, 8192 + 33, Layout::kAlongK, Layout::kAlongK, true, true, false));
    judge(Case(random, 1030, 17, 5, Layout::kAcross, kLayouts[turn % 3], false, true, false));
  }
  judge(Case(random, 33, 17, 8192 + 31, Layout::kAlongK, Layout::kAcross, true, true, false));
  judge(Case(random, 400, 5, 2048 + 31, Layout::kAlongK, Layout::kAlongK, true, true, false));
  judge(Case(random, 770, 2, 2048, Layout::kAlongK, Layout::kAcross, true, true, false));
}

#if PYMOE_MULTIVERSION
namespace {

// Compares every bit of a sum, for operands of arbitrary bits.
template <typename Tiles>
std::vector<uint32_t> product(int64_t left_rows, std::mt19937 random) {
  uint32_t left[16][16], right[16][16], sums[16][16];
  for (auto* tile : {&left, &right, &sums}) {
    for (auto& row : *tile) {
      for (auto& word : row) {
        const uint32_t kind = random() % 8;
        word = random();
        if (kind > 1) word = (word & 0x81ff81ffu) + 0x3e803e80u;
        if (kind == 2) word = (word & 0x80ff80ffu) + 0x00400040u;  // close to the least normal number, on both sides
      }
    }
  }
  Tiles tiles(left_rows);
  tiles.template load<3>(sums, 64);
  tiles.template load<5>(left, 64);
  tiles.template load<6>(right, 64);
  tiles.template multiply<3, 5, 6>();
  tiles.template multiply<3, 5, 6>();
  tiles.template store<3>(sums, 64);
  std::vector<uint32_t> bits;
  for (auto& row : sums) {
    for (uint32_t word : row) bits.push_back((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : word);
  }
  return bits;
}

}  // namespace

TEST_CASE("amx: emulated tiles have the bits of the processor's") {
  if (cpu::best_isa() < Isa::kAmx) {
    MESSAGE("skipped: the processor has no AMX, or the system does not grant it");
    return;
  }
  for (unsigned seed = 0; seed < 400; ++seed) {
    const std::mt19937 random(seed);
    const int64_t rows = 1 + seed % 16;
    REQUIRE(product<test::EmulatedTiles>(rows, random) == product<cpu::AmxTiles>(rows, random));
  }
}

TEST_CASE("amx: no thread is left with tiles") {
  if (cpu::best_isa() < Isa::kAmx) {
    MESSAGE("skipped: the processor has no AMX, or the system does not grant it");
    return;
  }
  std::mt19937 random(4);
  judge(Case(random, 20, 20, 20, Layout::kAlongK, Layout::kAlongK, false, false, false));
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));  // the parts of the processor state that are in use
  CHECK((low & 3u << 17) == 0);
}
#endif
