// dispatch: the emulated CUDA kernel moves the bytes that the CPU twin moves.
#include "cuda_on_cpu/harness.h"
#include "kernels/dispatch.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

// A random permutation of the rows, some choices dropped: the rows in use come first.
struct Slots {
  Buffer<int32_t> slot, used;
  Slots(Random& random, int64_t tokens, int64_t choices, double dropped) : slot(tokens * choices), used(1) {
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < slot.size(); ++i) {
      slot[i] = random.chance(dropped) ? -1 : 0;
      if (slot[i] == 0) rows.push_back(static_cast<int32_t>(rows.size()));
    }
    used[0] = static_cast<int32_t>(rows.size());
    std::shuffle(rows.begin(), rows.end(), random.engine());
    size_t next = 0;
    for (int32_t& value : slot) {
      if (value == 0) value = rows[next++];
    }
  }
};

}  // namespace

TEST_CASE("dispatch: the emulated kernel equals the CPU twin, byte for byte") {
  for_cases("dispatch", 120, [](Random& random) {
    const int64_t tokens = random.between(0, size(40, 6)), choices = random.between(1, size(9, 4));
    const int64_t row = 2 * random.between(0, random.chance(0.2) ? 700 : 40), shift = 2 * random.between(0, 8);
    Slots slots(random, tokens, choices, random.one_of({0.0, 0.3, 1.0}));
    Buffer<unsigned char> x(tokens * row, shift), expected(tokens * choices * row), out(tokens * choices * row, shift);
    for (auto& byte : x) byte = static_cast<unsigned char>(random.between(0, 255));
    cpu::dispatch({x.data(), slots.slot.data(), slots.used.data(), expected.data(), tokens, choices, row});
    cuda::dispatch({x.data(), slots.slot.data(), slots.used.data(), out.data(), tokens, choices, row}, nullptr);
    CHECK(out.same(expected));
    CHECK(out.intact());
  });
}

TEST_CASE("dispatch: slots and a row count that point outside touch nothing outside") {
  if (kSlow) return;  // two choices may then own one row: a race that such input asks for
  for_cases("dispatch hostile", 30, [](Random& random) {
    const int64_t tokens = random.between(1, 12), choices = random.between(1, 4), row = 2 * random.between(1, 40);
    const auto rows = static_cast<int32_t>(tokens * choices);
    Slots slots(random, tokens, choices, 0.0);
    slots.slot[random.between(0, rows - 1)] = random.one_of<int32_t>({-2, rows, rows + 1, INT32_MIN, INT32_MAX});
    slots.used[0] = random.one_of<int32_t>({-1, 0, rows + 1, INT32_MIN, INT32_MAX});
    Buffer<unsigned char> x(tokens * row), out(rows * row);
    cuda::dispatch({x.data(), slots.slot.data(), slots.used.data(), out.data(), tokens, choices, row}, nullptr);
    CHECK(out.intact());
  });
}

TEST_CASE("dispatch: rows past 2^31 bytes") {
  if (kSlow) return;
  for_cases("dispatch large", 4, [](Random& random) {
    const int64_t row = int64_t{1} << 25, choices = 80, target = random.between(70, 79);  // 2.3 GiB in
    SparseMemory x(row), out(row * choices);
    Buffer<int32_t> slot(choices), used(1);
    for (int32_t& value : slot) value = -1;
    slot[random.between(0, choices - 1)] = static_cast<int32_t>(target);
    used[0] = static_cast<int32_t>(choices);
    const int64_t at = random.between(0, row - 1);
    static_cast<unsigned char*>(x.data())[at] = 7;
    cuda::dispatch({x.data(), slot.data(), used.data(), out.data(), 1, choices, row}, nullptr);
    CHECK(static_cast<unsigned char*>(out.data())[target * row + at] == 7);
  });
}
