// Random routings for tests: rows for the choices of tokens, as build_routing may assign them, and experts' biases.
#pragma once

#include <algorithm>
#include <vector>

#include "core/expert_of_row.h"
#include "cuda_on_cpu/harness.h"

namespace pymoe::test {

// Every choice owns a different row, in random order, or was dropped; the rows in use come first.
struct Slots {
  Buffer<int32_t> slot, used;

  Slots(Random& random, int64_t tokens, int64_t choices, double dropped) : slot(tokens * choices), used(1) {
    std::vector<int32_t> rows;
    for (int32_t& value : slot) {
      value = random.chance(dropped) ? -1 : 0;
      if (value == 0) rows.push_back(static_cast<int32_t>(rows.size()));
    }
    used[0] = static_cast<int32_t>(rows.size());
    std::shuffle(rows.begin(), rows.end(), random.engine());
    size_t next = 0;
    for (int32_t& value : slot) {
      if (value == 0) value = rows[next++];
    }
  }

  // Returns the number of rows of a buffer: one per choice, or any number from the rows in use on.
  int64_t rows(Random& random) const { return random.chance(0.5) ? slot.size() : used[0] + random.between(0, 9); }

  // Makes some slots, and perhaps the number of rows in use, invalid: missing rows, or rows of another choice.
  void spoil(Random& random) {
    const auto rows = static_cast<int32_t>(slot.size());
    for (int32_t& value : slot) {
      if (!random.chance(0.4)) continue;
      value = random.one_of<int32_t>(
          {-2, -rows, rows, rows + 1, INT32_MIN, INT32_MAX, static_cast<int32_t>(random.between(0, rows - 1))});
    }
    used[0] = random.one_of<int32_t>({used[0], 0, -1, rows, rows + 1, INT32_MIN, INT32_MAX, rows / 2});
  }
};

// Biases (E, N) of experts, and offsets that divide `used` rows among them at random.
template <typename T>
struct RandomBiases {
  Buffer<T> values;
  Buffer<int32_t> offsets;

  RandomBiases(Random& random, int64_t used, int64_t features, int64_t shift)
      : RandomBiases(random, used, features, shift, random.one_of<int64_t>({1, 2, 3, 7, 32, 33, 130})) {}

  ExpertBiases of() const { return {values.data(), offsets.data(), offsets.size() - 1}; }

  // Makes some offsets invalid, after which no expert is the right one.
  void spoil(Random& random) {
    for (int32_t& value : offsets) {
      if (random.chance(0.5)) value = random.one_of<int32_t>({-1, 0, INT32_MIN, INT32_MAX, value + 1, value * 2});
    }
  }

 private:
  RandomBiases(Random& random, int64_t used, int64_t features, int64_t shift, int64_t experts)
      : values(experts * features, shift), offsets(experts + 1) {
    fill(values, random);
    for (int32_t& value : offsets) value = static_cast<int32_t>(random.between(0, used));
    offsets[0] = 0;
    std::sort(offsets.begin(), offsets.end());
    if (random.chance(0.7)) offsets[experts] = static_cast<int32_t>(used);
  }
};

}  // namespace pymoe::test
