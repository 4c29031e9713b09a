#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "buffer.h"
#include "kernels/dispatch.h"
#include "thread_backend.h"

using namespace pymoe;
using test::Buffer;
using test::WithThreads;

namespace {

struct Case {
  int64_t tokens, choices, row_bytes, dropped, rows;
  std::vector<unsigned char> x;
  std::vector<int32_t> slot;
  int32_t used;

  Case(int64_t tokens, int64_t choices, int64_t row_bytes, int64_t dropped = 0)
      : tokens(tokens),
        choices(choices),
        row_bytes(row_bytes),
        dropped(dropped),
        rows(tokens * choices),
        x(static_cast<size_t>(tokens * row_bytes)),
        slot(static_cast<size_t>(tokens * choices)),
        used(static_cast<int32_t>(tokens * choices - dropped)) {
    std::mt19937 random(7);
    for (auto& byte : x) byte = static_cast<unsigned char>(random());
    std::iota(slot.begin(), slot.end(), 0);
    std::shuffle(slot.begin(), slot.end(), random);
    for (auto& row : slot) {
      if (row >= used) row = -1;
    }
  }

  DispatchArguments arguments(Buffer<unsigned char>& out) const {
    return {x.data(), slot.data(), &used, out.data(), tokens, choices, rows, row_bytes};
  }

  int64_t wrong_rows(const Buffer<unsigned char>& out) const {
    std::vector<int64_t> owner(static_cast<size_t>(rows), -1);
    for (size_t i = 0; i < slot.size(); ++i) {
      if (slot[i] >= 0) owner[static_cast<size_t>(slot[i])] = static_cast<int64_t>(i) / choices;
    }
    const std::vector<unsigned char> zeros(static_cast<size_t>(row_bytes));
    int64_t wrong = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = owner[static_cast<size_t>(row)];
      const unsigned char* expected = token < 0 ? zeros.data() : x.data() + token * row_bytes;
      wrong += memcmp(out.data() + row * row_bytes, expected, static_cast<size_t>(row_bytes)) != 0;
    }
    return wrong;
  }
};

}  // namespace

TEST_CASE("dispatch copies rows, clears the unused, and stays inside") {
  const Case cases[] = {
      {0, 2, 64},   {1, 1, 2},          {5, 1, 6},       {33, 2, 100, 7},
      {64, 8, 256}, {40, 4, 4098, 160}, {257, 3, 16, 1}, {3000, 2, 2048, 11},  // the last case uses streaming stores
  };
  for (const Case& c : cases) {
    for (const int64_t shift : {0, 2}) {
      for (const int threads : {1, 2, 4}) {
        const WithThreads backend(threads);
        Buffer<unsigned char> out(c.tokens * c.choices * c.row_bytes, shift);
        cpu::dispatch(c.arguments(out));
        CHECK(out.intact());
        CHECK(c.wrong_rows(out) == 0);
      }
    }
  }
}

TEST_CASE("dispatch refuses a slot outside [-1, S) and writes nothing outside") {
  for (const int32_t hostile : {-2, 20, 21, INT_MAX, INT_MIN, 1 << 20}) {
    for (const int threads : {1, 4}) {
      const WithThreads backend(threads);
      Case c(10, 2, 48);
      c.slot[13] = hostile;
      Buffer<unsigned char> out(10 * 2 * 48);
      CHECK_THROWS_AS(cpu::dispatch(c.arguments(out)), std::out_of_range);
      CHECK(out.intact());
    }
  }
}

TEST_CASE("dispatch takes any count of used rows") {
  for (const int32_t used : {INT_MIN, -1, 0, 20, 21, INT_MAX}) {
    Case c(10, 2, 32);
    c.used = used;
    Buffer<unsigned char> out(10 * 2 * 32);
    cpu::dispatch(c.arguments(out));
    CHECK(out.intact());
  }
}

TEST_CASE("dispatch fills a buffer of any number of rows") {
  for (const int64_t rows : {0, 7, 20, 61, 5000}) {
    for (const int threads : {1, 4}) {
      const WithThreads backend(threads);
      Case c(10, 2, 2048, 20 - std::min<int64_t>(rows, 20));
      c.rows = rows;
      Buffer<unsigned char> out(rows * 2048);
      cpu::dispatch(c.arguments(out));
      CHECK(out.intact());
      CHECK(c.wrong_rows(out) == 0);
      if (rows > 0) c.slot[3] = static_cast<int32_t>(rows);
      if (rows > 0) CHECK_THROWS_AS(cpu::dispatch(c.arguments(out)), std::out_of_range);
      CHECK(out.intact());
    }
  }
  Case none(0, 2, 48);
  none.rows = 9;
  Buffer<unsigned char> out(9 * 48);
  cpu::dispatch(none.arguments(out));
  CHECK(none.wrong_rows(out) == 0);
}
