// Stable counting sort after the gate, on the GPU, in one launch.
//
// Choices are cut into tiles, one block each: the choices of one tile of the gate, or of several. The first row of a
// tile for an expert follows from two counts of the expert's choices: in all tiles, and in earlier tiles. The gate has
// counted the choices in each of its tiles (choice_counts.h). So every block adds up the gate's counts, instead of
// counting all choices or needing a launch that does; the first block writes the sums, `load`.
//
// A thread adds the counts of four experts, as two words of two 16-bit sums each. First, every group of threads adds up
// its share of the tiles: with G groups, group g takes tiles g, g + G, g + 2 G, ... Then one thread per four experts
// adds the sums of the groups. The rest is as in build_routing_cuda.cu: offsets by a scan over the experts, every warp
// counts a stretch of the tile, a prefix over the warps, and __match_any_sync ranks the 32 choices of a round. No
// result depends on the order in which blocks run.
#include <algorithm>

#include "kernels/build_routing.h"
#include "kernels/cuda/lane_group.h"
#include "kernels/cuda/pack.h"

namespace pymoe::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarp;
// Largest number of blocks. Each block reads all of the gate's counts, so more blocks read more.
constexpr int64_t kMostTiles = 128;
constexpr int64_t kMostGroups = 32;  // maximum number of groups of threads; one thread adds the sums of all groups
constexpr int kPack = ChoiceCounts::kCountPack;
// Thanks to the limit on the number of experts, every pack has a thread, and half of the warps are left for other work.
static_assert(kPack == 4 && ChoiceCounts::kMostExperts <= kPack * kThreads / 2);

// Sums of the counts of four experts, 16 bits each: an expert has at most one choice per token, and there are at most
// ChoiceCounts::kMostTokens tokens.
using Sums = Pack<unsigned, kPack / 2>;
static_assert(ChoiceCounts::kMostTokens <= 0xffff);

struct Sort {
  const int32_t* experts;
  int32_t *slot, *token, *offsets, *load;
  const uint16_t* counts;
  uint64_t reciprocal;  // 1 / choices per token, times 2^kShift, rounded up
  int rows, num_experts, capacity;
  int tiles, packs;  // tiles of the gate; packs per tile
  int lanes_log2;    // log2 of threads per group: the number of packs, rounded up to a power of two
  int groups;        // number of groups of threads
  int each;          // tiles of the gate per block
  int tile;          // choices per block
  int rounds;        // rounds of 32 choices per warp

  // token_of(i) returns i / choices, the token of choice i. Rounding the reciprocal up adds less than i / 2^kShift to
  // the quotient, which is less than 1 / choices, so its integer part does not change.
  static constexpr int kShift = 37;
  static_assert(ChoiceCounts::kMostTokens * ChoiceCounts::kMostExperts * ChoiceCounts::kMostExperts < int64_t{1}
                                                                                                          << kShift);
  PYMOE_DEVICE int token_of(int i) const { return static_cast<int>(static_cast<uint64_t>(i) * reciprocal >> kShift); }

  PYMOE_HOST_DEVICE int stride() const { return packs * kPack; }
  PYMOE_HOST_DEVICE int parts() const { return 2 * groups * packs; }
};

// The number of choices of each expert in the pack: in all tiles, and in the tiles before the block's first one.
struct Counts {
  Sums all{}, earlier{};

  PYMOE_DEVICE void add(const Sums& more_in_all, const Sums& more_earlier) {
#pragma unroll
    for (int i = 0; i < Sums::kSize; ++i) all[i] += more_in_all[i], earlier[i] += more_earlier[i];
  }
};

PYMOE_DEVICE int count_in(const Sums& sums, int i) {
  return static_cast<int>(i % 2 == 0 ? sums[i / 2] & 0xffffu : sums[i / 2] >> 16);
}

// Adds up the counts of the thread's pack of experts over the tiles that the thread's group reads. Writes the sums over
// all these tiles to the first half of `parts`, and the sums over those before the block's first tile to the second.
PYMOE_DEVICE void sum_tiles(const Sort& s, Sums* parts) {
  constexpr int kLoads = 8;
  const int thread = static_cast<int>(threadIdx.x), group = thread >> s.lanes_log2;
  const int pack = thread & ((1 << s.lanes_log2) - 1);
  const int packs = s.packs;
  if (group >= s.groups || pack >= packs) return;
  Counts counts;
  const int own = static_cast<int>(blockIdx.x) * s.each;
  const int step = s.groups * packs;
  const auto* const from = reinterpret_cast<const word_of<Sums>*>(s.counts) + pack;
  for (int first = group; first < s.tiles; first += kLoads * s.groups) {
    Sums loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      word_of<Sums> word{};
      if (first + i * s.groups < s.tiles) word = from[first * packs + i * step];
      loaded[i] = bit_cast<Sums>(word);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) counts.add(loaded[i], first + i * s.groups < own ? loaded[i] : Sums{});
  }
  parts[group * s.packs + pack] = counts.all;
  parts[(s.groups + group) * s.packs + pack] = counts.earlier;
}

// Replaces every warp's count of an expert's choices with the sum of the counts of all earlier warps. All threads from
// thread `first` on must call it.
PYMOE_DEVICE void sum_warps(int first, int experts, int32_t* of_warps) {
  for (int expert = static_cast<int>(threadIdx.x) - first; expert < experts; expert += kThreads - first) {
    int32_t counts[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) counts[warp] = of_warps[warp * experts + expert];
    int32_t before = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      of_warps[warp * experts + expert] = before;
      before += counts[warp];
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) place_counted_kernel(const Sort s) {
  PYMOE_DYNAMIC_SHARED(uint4, memory);  // packs of four words
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int stride = s.stride();
  auto* const of_warps = reinterpret_cast<int32_t*>(memory);
  int32_t* const limit = of_warps + kWarps * stride;
  int32_t* const first = limit + stride;
  int32_t* const ends = first + stride;  // number of rows of each warp's experts
  auto* const parts = reinterpret_cast<Sums*>(ends + kWarps);

  const int begin = static_cast<int>(blockIdx.x) * s.tile, end = min(begin + s.tile, s.rows);
  const auto place = [&](int round) { return begin + (warp * s.rounds + round) * kWarp + lane; };
  const auto expert_in = [&](int round) {
    const int i = place(round);
    return round < s.rounds && i < end ? s.experts[i] : -1;
  };
  const int in_first_round = expert_in(0);  // loaded together with the gate's counts
  int32_t* const of_warp = of_warps + warp * stride;
#pragma unroll 1
  for (int pack = lane; pack < s.packs; pack += kWarp) reinterpret_cast<uint4*>(of_warp)[pack] = uint4{};
  sum_tiles(s, parts);
  __syncwarp();
  if (in_first_round >= 0) atomicAdd(&of_warp[in_first_round], 1);
#pragma unroll 1
  for (int round = 1; round < s.rounds; ++round) {
    const int expert = expert_in(round);
    if (expert >= 0) atomicAdd(&of_warp[expert], 1);
  }
  __syncthreads();

  // The first warps have a pack of experts in every lane, and compute the offsets. Meanwhile, the others add up the
  // counts of the block's warps.
  const int warps_of_packs = (s.packs + kWarp - 1) / kWarp;
  Counts counts;
  int32_t ends_in_warp[kPack] = {};
  if (warp >= warps_of_packs) {
    sum_warps(warps_of_packs * kWarp, stride, of_warps);
  } else {
    if (thread < s.packs) {
#pragma unroll 8
      for (int group = 0; group < s.groups; ++group) {
        counts.add(parts[group * s.packs + thread], parts[(s.groups + group) * s.packs + thread]);
      }
    }
    int32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) ends_in_warp[i] = kept += min(count_in(counts.all, i), s.capacity);
    const int32_t until = scan_lanes<kWarp>(kept, lane, Sum{});
#pragma unroll
    for (int i = 0; i < kPack; ++i) ends_in_warp[i] += until - kept;
    if (lane == kWarp - 1) ends[warp] = until;
  }
  __syncthreads();
  if (thread < s.packs) {
    int32_t earlier_warps = 0;
#pragma unroll 1
    for (int other = 0; other < warp; ++other) earlier_warps += ends[other];
    Pack<int32_t, kPack> limits, firsts;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const int all = count_in(counts.all, i), expert = thread * kPack + i;
      limits[i] = earlier_warps + ends_in_warp[i];
      firsts[i] = limits[i] - min(all, s.capacity) + count_in(counts.earlier, i);
      if (blockIdx.x == 0 && expert < s.num_experts) {
        s.load[expert] = all;
        s.offsets[expert + 1] = limits[i];
      }
    }
    reinterpret_cast<uint4*>(limit)[thread] = bit_cast<uint4>(limits);
    reinterpret_cast<uint4*>(first)[thread] = bit_cast<uint4>(firsts);
    if (blockIdx.x == 0 && thread == 0) s.offsets[0] = 0;
  }
  __syncthreads();

  int next = in_first_round;
#pragma unroll 1
  for (int round = 0; round < s.rounds; ++round) {
    const int i = place(round), expert = next;
    next = expert_in(round + 1);  // loaded while this round's choices are placed
    const unsigned same = __match_any_sync(kFullWarp, expert);
    const int rank = __popc(same & ((1u << lane) - 1u));
    const int32_t row = expert >= 0 ? first[expert] + of_warp[expert] + rank : 0;
    if (round + 1 < s.rounds) {
      __syncwarp();
      if (expert >= 0 && rank == 0) of_warp[expert] += __popc(same);
      __syncwarp();
    }
    if (i >= end) continue;  // safe: no collective follows in this round
    const bool kept = row < limit[expert];
    s.slot[i] = kept ? row : -1;
    if (kept) s.token[row] = s.token_of(i);
  }
  const int32_t used = limit[s.num_experts - 1];
#pragma unroll 1
  for (int round = 0; round < s.rounds; ++round) {
    const int row = place(round);
    if (row >= used && row < end) s.token[row] = -1;
  }
}

}  // namespace

void build_routing_counted(const CountedRoutingArguments& a, void* stream) {
  const ChoiceCounts& counts = a.counts;
  const int64_t of_gate = std::max<int64_t>(1, counts.tokens * a.choices);  // choices per tile of the gate
  const int64_t each = std::max({int64_t{1}, kThreads / of_gate, ceil_div(counts.tiles, kMostTiles)});
  const int64_t packs = counts.stride / kPack;
  Sort s{};
  s.experts = static_cast<const int32_t*>(a.experts);
  s.slot = a.slot;
  s.token = a.token;
  s.offsets = a.offsets;
  s.load = a.load;
  s.counts = counts.values;
  s.rows = static_cast<int>(a.tokens * a.choices);
  s.reciprocal = static_cast<uint64_t>(ceil_div(int64_t{1} << Sort::kShift, std::max<int64_t>(1, a.choices)));
  s.num_experts = static_cast<int>(a.num_experts);
  s.capacity = static_cast<int>(std::min<int64_t>(a.capacity, ChoiceCounts::kMostTokens));  // most choices of an expert
  s.tiles = static_cast<int>(counts.tiles);
  s.packs = static_cast<int>(packs);
  while ((1 << s.lanes_log2) < s.packs) ++s.lanes_log2;
  s.groups = static_cast<int>(std::min<int64_t>(kThreads >> s.lanes_log2, kMostGroups));
  s.each = static_cast<int>(each);
  s.tile = static_cast<int>(each * of_gate);
  s.rounds = static_cast<int>(ceil_div(s.tile, kThreads));
  constexpr int64_t kWord = sizeof(int32_t);
  const int64_t shared_bytes = kWord * ((kWarps + 2) * s.stride() + kWarps) + s.parts() * int64_t{sizeof(Sums)};
  launch("build_routing", place_counted_kernel,
         {std::max<int64_t>(1, ceil_div(counts.tiles, each)), kThreads, shared_bytes}, stream, s);
}

}  // namespace pymoe::cuda
