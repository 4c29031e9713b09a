#include "kernels/gate_topk.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/order.h"
#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

// A column and the order key of its value. select_sorted, which is used for many choices, sorts such pairs as far as
// needed, and writes the values and columns of the best `choices`, `stride` elements apart.
template <typename S>
struct KeyedColumn {
  order_key_t<S> key;
  order_key_t<S> column;
  friend bool operator<(const KeyedColumn& a, const KeyedColumn& b) {  // true if a is chosen before b
    return a.key != b.key ? a.key > b.key : a.column < b.column;
  }
};

template <typename S>
void select_sorted(const S* row, int64_t size, int64_t choices, int64_t stride, S* values, order_key_t<S>* columns,
                   unsigned char* scratch) {
  auto* pairs = reinterpret_cast<KeyedColumn<S>*>(scratch);
  for (int64_t i = 0; i < size; ++i) pairs[i] = {order_key(row[i]), static_cast<order_key_t<S>>(i)};
  if (choices < size) std::nth_element(pairs, pairs + choices - 1, pairs + size);
  std::sort(pairs, pairs + choices);
  for (int64_t j = 0; j < choices; ++j) {
    values[j * stride] = value_of_key<S>(pairs[j].key);
    columns[j * stride] = pairs[j].column;
  }
}

constexpr int64_t kTile = 16;  // no instruction set processes more tokens at once

struct alignas(64) Line {
  unsigned char bytes[64];
};

int64_t scratch_bytes(const GateTopkArguments& a) {
  constexpr int64_t kWidest = 8;  // bytes of an element or key
  const int64_t rows = 5 * a.num_experts + 3 * a.choices + 2 * a.num_groups;
  return kTile * kWidest * rows + 2 * kWidest * a.num_experts + 16 * 64;
}

}  // namespace
}  // namespace pymoe::cpu

// With v4, a tile has 16 tokens instead of 8, which loses more to empty lanes than it saves in instructions: over ten
// shapes on a Zen 5, measured in alternation on the same memory, v4 took 0.92 to 1.18 times as long as v3, with a
// median of 1.03 (groups of 24 experts 1.18, E256 K8 1.10, E64 K2 1.11, E160 in groups 0.92).
#define PYMOE_ISA_WIDEST 3
#define PYMOE_ISA_BODY "kernels/gate_topk_cpu_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace pymoe::cpu {

void gate_topk(const GateTopkArguments& a) {
  std::memset(a.load, 0, static_cast<size_t>(a.num_experts) * sizeof(int32_t));
  const int64_t tiles = (a.tokens + kTile - 1) / kTile;
  const int64_t tile_work = kTile * (a.num_experts + 8 * a.choices);
  const auto gate_tokens = PYMOE_SELECT_ISA_UP_TO_V3(gate_tokens);
  parallel_for(0, tiles, std::max<int64_t>(1, (int64_t{16} << 10) / tile_work), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<Line[]> scratch(new Line[static_cast<size_t>(scratch_bytes(a)) / sizeof(Line) + 1]);
    std::vector<int32_t> histogram(static_cast<size_t>(a.num_experts));
    gate_tokens(a, begin * kTile, std::min(end * kTile, a.tokens), scratch[0].bytes, histogram.data());
    for (int64_t e = 0; e < a.num_experts; ++e) {
      if (histogram[e] != 0) std::atomic_ref<int32_t>(a.load[e]).fetch_add(histogram[e], std::memory_order_relaxed);
    }
  });
}

}  // namespace pymoe::cpu
