// Three passes over blocks of choices, whose size depends only on the input's sizes: count each block's choices per
// expert, scan the counts over (expert, block), then assign rows block by block. Within a block choices are visited in
// order, and an expert's rows from earlier blocks come first, so the sort is stable, whichever thread runs which block.
#include <algorithm>
#include <cstring>

#include "core/macros.h"
#include "kernels/build_routing.h"
#include "kernels/cpu/checked_index.h"
#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

// Returns the number of choices per block. A block adds E counters to the scan; with at least 8 choices per counter,
// the scan stays cheap.
int64_t block_size(int64_t rows, int64_t num_experts) {
  return std::min(std::max<int64_t>(8192, 8 * num_experts), std::max<int64_t>(rows, 1));
}

int64_t count_blocks(int64_t rows, int64_t num_experts) {
  const int64_t size = block_size(rows, num_experts);
  return (rows + size - 1) / size;
}

template <typename Index>
void count(const BuildRoutingArguments& a, int64_t begin, int64_t end, int32_t* PYMOE_RESTRICT counts) {
  const auto* PYMOE_RESTRICT experts = static_cast<const Index*>(a.experts);
  std::fill_n(counts, a.num_experts, 0);
  for (int64_t i = begin; i < end; ++i) {
    const auto expert = static_cast<uint64_t>(static_cast<int64_t>(experts[i]));
    if (expert >= static_cast<uint64_t>(a.num_experts)) {
      if (a.foreign && experts[i] >= 0) continue;
      throw_bad_expert("build_routing", a.num_experts, experts[i], i, a.choices);
    }
    ++counts[expert];
  }
}

template <typename Index>
void place(const BuildRoutingArguments& a, int64_t begin, int64_t end, int32_t* PYMOE_RESTRICT next) {
  const auto* PYMOE_RESTRICT experts = static_cast<const Index*>(a.experts);
  const int32_t* PYMOE_RESTRICT limits = a.offsets + 1;
  int32_t* PYMOE_RESTRICT slots = a.slot;
  int32_t* PYMOE_RESTRICT tokens = a.token;
  int64_t token = begin / a.choices, choice = begin % a.choices;
  for (int64_t i = begin; i < end; ++i) {
    slots[i] = -1;
    const auto expert = experts[i];
    if (expert < a.num_experts) {  // otherwise the choice is foreign
      const int32_t row = next[expert];
      if (row < limits[expert]) {
        next[expert] = row + 1;
        slots[i] = row;
        tokens[row] = static_cast<int32_t>(token);
      }
    }
    if (++choice == a.choices) {
      choice = 0;
      ++token;
    }
  }
}

template <typename Index>
void run(const BuildRoutingArguments& a) {
  const int64_t rows = a.tokens * a.choices;
  const int64_t size = block_size(rows, a.num_experts), blocks = count_blocks(rows, a.num_experts);
  parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      count<Index>(a, block * size, std::min(rows, (block + 1) * size), a.workspace + block * a.num_experts);
    }
  });

  int64_t used = 0;
  for (int64_t expert = 0; expert < a.num_experts; ++expert) {
    a.offsets[expert] = static_cast<int32_t>(used);
    int64_t seen = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      int32_t& counter = a.workspace[block * a.num_experts + expert];
      const int64_t here = counter;
      counter = static_cast<int32_t>(used + std::min(seen, a.capacity));  // the block's first row for this expert
      seen += here;
    }
    used += std::min(seen, a.capacity);
  }
  a.offsets[a.num_experts] = static_cast<int32_t>(used);

  parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      place<Index>(a, block * size, std::min(rows, (block + 1) * size), a.workspace + block * a.num_experts);
    }
  });
  std::fill(a.token + used, a.token + rows, -1);
}

}  // namespace

int64_t build_routing_workspace(int64_t rows, int64_t num_experts) {
  return count_blocks(rows, num_experts) * num_experts;
}

void build_routing(const BuildRoutingArguments& arguments) {
  if (arguments.wide) {
    run<int64_t>(arguments);
  } else {
    run<int32_t>(arguments);
  }
}

}  // namespace pymoe::cpu
