// Tests dispatch: the emulated CUDA kernel must move the same bytes as the CPU kernel.
#include "cuda_on_cpu/harness.h"
#include "cuda_on_cpu/slots.h"
#include "kernels/dispatch.h"

using namespace pymoe;
using namespace pymoe::test;

TEST_CASE("dispatch: the emulated kernel equals the CPU twin, byte for byte") {
  for_cases("dispatch", 120, [](Random& random) {
    const int64_t tokens = random.between(0, size(40, 6)), choices = random.between(1, size(20, 4));
    const int64_t unit = random.one_of<int64_t>({1, 2, 2, 4, 8, 16, 16});
    const int64_t row = unit * random.between(0, random.chance(0.2) ? 700 : 40);
    const int64_t x_shift = unit * random.between(0, 3), out_shift = unit * random.between(0, 3);
    Slots slots(random, tokens, choices, random.one_of({0.0, 0.3, 1.0}));
    const int64_t rows = slots.rows(random);
    Buffer<unsigned char> x(tokens * row, x_shift), expected(rows * row), out(rows * row, out_shift);
    for (auto& byte : x) byte = static_cast<unsigned char>(random.between(0, 255));
    cpu::dispatch({x.data(), slots.slot.data(), slots.used.data(), expected.data(), tokens, choices, rows, row});
    cuda::dispatch({x.data(), slots.slot.data(), slots.used.data(), out.data(), tokens, choices, rows, row}, nullptr);
    CHECK(out.same(expected));
    CHECK(out.intact());
  });
}

TEST_CASE("dispatch: rows of several stretches, and of as many words as a block or a stretch holds") {
  for_cases("dispatch wide", 16, [](Random& random) {
    const int64_t tokens = random.between(1, 3), choices = random.between(1, 3);
    const int64_t row = 16 * random.one_of<int64_t>({127, 128, 129, 896, 1023, 1024, 1025, 1792, size(3000, 1025)});
    Slots slots(random, tokens, choices, random.one_of({0.0, 0.6}));
    Buffer<unsigned char> x(tokens * row), expected(tokens * choices * row), out(tokens * choices * row);
    for (auto& byte : x) byte = static_cast<unsigned char>(random.between(0, 255));
    cpu::dispatch(
        {x.data(), slots.slot.data(), slots.used.data(), expected.data(), tokens, choices, tokens * choices, row});
    cuda::dispatch({x.data(), slots.slot.data(), slots.used.data(), out.data(), tokens, choices, tokens * choices, row},
                   nullptr);
    CHECK(out.same(expected));
    CHECK(out.intact());
  });
}

TEST_CASE("dispatch: slots and a row count that point outside touch nothing outside, and spoil no other row") {
  for_cases("dispatch hostile", 40, [](Random& random) {
    const int64_t tokens = random.between(1, 12), choices = random.between(1, 4), row = 2 * random.between(1, 40);
    const auto rows = static_cast<int32_t>(tokens * choices);
    Slots slots(random, tokens, choices, 0.0);
    const int64_t place = random.between(0, rows - 1);
    const int32_t orphan = slots.slot[place];
    slots.slot[place] = random.one_of<int32_t>({-2, rows, rows + 1, INT32_MIN, INT32_MAX});
    slots.used[0] = random.one_of<int32_t>({-1, 0, rows, rows + 1, INT32_MIN, INT32_MAX});
    Buffer<unsigned char> x(tokens * row), out(rows * row);
    for (auto& byte : x) byte = static_cast<unsigned char>(random.between(0, 255));
    cuda::dispatch({x.data(), slots.slot.data(), slots.used.data(), out.data(), tokens, choices, tokens * choices, row},
                   nullptr);
    CHECK(out.intact());
    const std::vector<unsigned char> zeros(static_cast<size_t>(row));
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int32_t target = slots.slot[i];
      if (i == place) continue;
      const unsigned char* expected = slots.used[0] > 0 ? x.data() + i / choices * row : zeros.data();
      wrong += memcmp(out.data() + target * row, expected, static_cast<size_t>(row)) != 0;
    }
    if (slots.used[0] <= 0) wrong += memcmp(out.data() + orphan * row, zeros.data(), static_cast<size_t>(row)) != 0;
    CHECK(wrong == 0);
  });
}

TEST_CASE("dispatch: a slot of a row that is not in use is skipped, as the row is cleared") {
  for_cases("dispatch unused", 12, [](Random& random) {
    const int64_t tokens = 6, choices = 2, row = 48, rows = tokens * choices;
    Slots slots(random, tokens, choices, 0.0);
    slots.used[0] = static_cast<int32_t>(random.between(0, rows));
    Buffer<unsigned char> x(tokens * row), expected(rows * row), out(rows * row);
    for (auto& byte : x) byte = static_cast<unsigned char>(random.between(1, 255));
    cpu::dispatch(
        {x.data(), slots.slot.data(), slots.used.data(), expected.data(), tokens, choices, tokens * choices, row});
    cuda::dispatch({x.data(), slots.slot.data(), slots.used.data(), out.data(), tokens, choices, tokens * choices, row},
                   nullptr);
    CHECK(out.same(expected));
  });
}

// Covers streaming stores, which are used from 64 MiB on, and offsets past 2^31, in sparse memory.
TEST_CASE("dispatch: more than 2^31 bytes and rows past them") {
  if (kSlow) return;
  for_cases("dispatch large", 8, [](Random& random) {
    const int64_t row = int64_t{16} << 10, choices = 150000, target = choices - random.between(1, 9);
    SparseMemory x(row), out(row * choices);  // 2.1 GiB and more, of which two rows are touched
    Buffer<int32_t> slot(choices), used(1);
    for (int32_t& value : slot) value = -1;
    slot[random.between(0, choices - 1)] = static_cast<int32_t>(target);
    used[0] = static_cast<int32_t>(random.chance(0.5) ? choices : target + 1);
    const int64_t at = random.between(0, row - 1);
    static_cast<unsigned char*>(x.data())[at] = 7;
    auto* const bytes = static_cast<unsigned char*>(out.data());
    memset(bytes + (target + 1) * row, 0xa5, static_cast<size_t>((choices - target - 1) * row));
    cuda::dispatch({x.data(), slot.data(), used.data(), out.data(), 1, choices, choices, row}, nullptr);
    CHECK(bytes[target * row + at] == 7);
    CHECK((choices - 1 == target || bytes[row * choices - 1] == (used[0] == choices ? 0xa5 : 0)));
  });
}
