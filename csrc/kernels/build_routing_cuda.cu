// Stable counting sort on the GPU, in one launch for few choices and in two for many. (If the gate has counted the
// choices, build_routing_counted_cuda.cu is used instead.)
//
// Choices are cut into tiles, one block each. To place the choices of its tile, a block needs two counts of every
// expert's choices: in all tiles (which gives the offsets) and in earlier tiles. Blocks never wait for one another, so
// they get these counts in one of two ways:
//
//   one launch    every block counts all choices itself. It reads 4 S bytes from L2 (8 S for int64), which is 128 KiB
//                 per block for the S = 32768 of 4096 tokens and 8 choices, and makes S additions in shared memory, of
//                 some seven instructions each (sm_90). If the block has 32 warps, each lane adds to a separate column
//                 of counters, which lies in one bank; with 16 warps, two lanes share a column, in two banks. One
//                 addition updates both counts, of 16 bits each.
//   two launches  a first kernel writes every tile's histogram to the workspace, and every block of the second one
//                 sums them. This has twice the launches, but a block counts only its own tile.
//
// The rest is the same for both: a scan over the experts gives offsets; every warp of the block owns a stretch of the
// tile and counts it; a prefix over the warps gives each its first row per expert; then the warp takes 32 choices at a
// time, and __match_any_sync gives their ranks among the choices of the same expert. Ranks follow the order of the
// choices everywhere, so the sort is stable, and no result depends on the order in which blocks run.
//
// A block has (warps + 2) * E counters. They are in shared memory for up to 4218 experts (fewer warps make room for
// more experts), otherwise in the workspace. Nothing needs initialisation: all memory is written before it is read.
#include <algorithm>
#include <type_traits>

#include "kernels/build_routing.h"
#include "kernels/cuda/lane_group.h"
#include "kernels/cuda/pack.h"

namespace pymoe::cuda {
namespace {

constexpr const char* kName = "build_routing";
constexpr int kMostWarps = 32;
constexpr int64_t kOneLaunchRows = int64_t{48} << 10;  // below 2^16, because this variant's counts have 16 bits
constexpr int kOneLaunchWarps = 16;                    // fewer warps would take too long to count all choices

// The division of choices into tiles, which depends only on the sizes.
struct Plan {
  bool in_shared;  // true if the blocks' counters are in shared memory
  bool one_launch;
  int warps;       // per block
  int64_t rounds;  // rounds of 32 choices per warp
  int64_t tiles;   // number of tiles, and so of blocks

  int64_t tile() const { return warps * rounds * kWarp; }
  int64_t counters(int64_t experts) const { return (warps + 2) * experts; }  // per block
};

constexpr int64_t kScanWords = kMostWarps;  // words for the scan, before the counters in shared memory
constexpr int64_t kSharedWords = kMostSharedBytes / static_cast<int64_t>(sizeof(int32_t)) - kScanWords;

Plan make_plan(int64_t rows, int64_t experts) {
  Plan plan{};
  for (plan.warps = kMostWarps; plan.warps > 4 && plan.counters(experts) > kSharedWords;) plan.warps /= 2;
  plan.in_shared = plan.counters(experts) <= kSharedWords;
  plan.one_launch = plan.in_shared && plan.warps >= kOneLaunchWarps && rows <= kOneLaunchRows;
  plan.rounds = 1;
  if (!plan.one_launch) {
    // Every block reads all tiles' histograms, so many experts call for fewer tiles. Counters in the workspace pay off
    // only with at least 8 choices per expert and tile.
    const int64_t most_tiles = std::clamp<int64_t>((int64_t{64} << 10) / experts, 32, 128);
    const int64_t fewest = plan.in_shared ? 2 * plan.warps * kWarp : 8 * experts;
    plan.rounds = ceil_div(std::max(fewest, ceil_div(rows, most_tiles)), plan.warps * kWarp);
  }
  plan.tiles = std::max<int64_t>(1, ceil_div(rows, plan.tile()));
  return plan;
}

// Returns the expert of a choice, or -1 if the choice names no valid expert.
template <typename Index>
PYMOE_DEVICE int expert_of(Index named, int experts) {
  using Unsigned = std::conditional_t<sizeof(Index) == 8, uint64_t, uint32_t>;  // negative indices become large ones
  return static_cast<Unsigned>(named) < static_cast<Unsigned>(experts) ? static_cast<int>(named) : -1;
}

struct Tile {
  int64_t begin;
  int rounds;

  // Returns the index of the choice that this thread handles in round `round` of its warp.
  PYMOE_DEVICE int64_t place(int round) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    return begin + (static_cast<int64_t>(warp) * rounds + round) * kWarp + lane;
  }
};

// --- counts of an expert's choices: in all tiles, and in earlier tiles ---

// Returns the increment for a choice: 1 in the low half of the word (all tiles), and 1 in the high half if it lies in
// an earlier tile.
PYMOE_DEVICE unsigned count_of(int choice, int tile_begin) { return choice < tile_begin ? 0x10001u : 1u; }

// Adds `count` to a column of counts for every choice in the pack; the counts of consecutive experts are `stride` bytes
// apart. To avoid a branch, choices without an expert are counted, too: in the words in front of the column, which are
// used only later, by the scan.
template <typename Index, int kCount>
PYMOE_DEVICE void count_choices(const Pack<Index, kCount>& named, unsigned count, int experts, int stride,
                                unsigned char* column) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    atomicAdd(reinterpret_cast<unsigned*>(column + expert_of(named[i], experts) * stride), count);
  }
}

// Counts every expert's choices: total[e] in all tiles, before[e] in the tiles before this one. Requires rows <=
// kOneLaunchRows, room for experts * warps words in scratch, and a tile_begin that is a multiple of the pack size.
template <typename Index>
PYMOE_DEVICE void count_all(const Index* PYMOE_RESTRICT named, int rows, int tile_begin, int experts, int32_t* scratch,
                            int32_t* total, int32_t* before) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(Index)), kLoads = 4;
  using Wide = Pack<Index, kWide>;
  auto* counts = reinterpret_cast<unsigned*>(scratch);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int columns = threads / kWarp;  // a power of two
  const int stride = columns * static_cast<int>(sizeof(unsigned));
  auto* const column = reinterpret_cast<unsigned char*>(counts + (thread & (columns - 1)));
  for (int i = thread; i < experts * columns; i += threads) counts[i] = 0;
  __syncthreads();

  // All loads of a batch are issued before the first value is used. Past the last pack, that pack is loaded again and
  // adds 0 to the counts.
  const int packs = reinterpret_cast<uintptr_t>(named) % sizeof(Wide) == 0 ? rows / kWide : 0;
  for (int batch = thread; batch < packs; batch += kLoads * threads) {
    Wide loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = load_pack<Wide>(named + min(batch + i * threads, packs - 1) * kWide);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int pack = batch + i * threads;
      const unsigned count = pack < packs ? count_of(pack * kWide, tile_begin) : 0;
      count_choices(loaded[i], count, experts, stride, column);
    }
  }
  for (int i = packs * kWide + thread; i < rows; i += threads) {
    count_choices(Pack<Index, 1>{{named[i]}}, count_of(i, tile_begin), experts, stride, column);
  }
  __syncthreads();

  for (int64_t expert = thread; expert < experts; expert += threads) {
    unsigned both = 0;
    for (int i = 0; i < columns; ++i)
      both += counts[expert * columns + ((expert + i) & (columns - 1))];  // spreads the lanes over the banks
    total[expert] = static_cast<int32_t>(both & 0xffffu);
    before[expert] = static_cast<int32_t>(both >> 16);
  }
  __syncthreads();
}

// Computes total[e] and before[e] for tile `tile` from the histograms of all tiles. Warp w sums tiles w, w + warps, w +
// 2 * warps, ...
PYMOE_DEVICE void sum_histograms(const int32_t* PYMOE_RESTRICT histograms, int64_t tiles, int64_t tile, int experts,
                                 int32_t* total, int32_t* before) {
  constexpr int kLoads = 4;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / kWarp, warps = threads / kWarp;
  for (int64_t expert = thread; expert < experts; expert += threads) total[expert] = before[expert] = 0;
  __syncthreads();
  for (int64_t expert = thread % kWarp; expert < experts; expert += kWarp) {
    int32_t all = 0, earlier = 0;
    for (int64_t first = warp; first < tiles; first += kLoads * warps) {
      int32_t loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t other = first + i * warps;
        loaded[i] = other < tiles ? histograms[other * experts + expert] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        all += loaded[i];
        if (first + i * warps < tile) earlier += loaded[i];
      }
    }
    if (all != 0) atomicAdd(&total[expert], all);
    if (earlier != 0) atomicAdd(&before[expert], earlier);
  }
  __syncthreads();
}

// --- begin and end of rows ---

// Computes two numbers for every expert from total[e] and before[e]: first[e], the tile's first row for the expert,
// which replaces before[e], and limit[e], the end of the expert's rows, which replaces total[e]. `sums` has one word
// per warp.
PYMOE_DEVICE void scan_experts(int experts, int64_t capacity, int32_t* sums, int32_t* total_to_limit,
                               int32_t* before_to_first) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / kWarp, lane = thread % kWarp, warps = threads / kWarp;
  int32_t carry = 0;
  for (int64_t chunk = 0; chunk < experts; chunk += threads) {
    const int64_t expert = chunk + thread;
    const int32_t total = expert < experts ? total_to_limit[expert] : 0;
    const int32_t kept = total < capacity ? total : static_cast<int32_t>(capacity);
    const int32_t within = scan_lanes<kWarp>(kept, lane, Sum{});  // inclusive sum within the warp
    if (lane == kWarp - 1) sums[warp] = within;
    __syncthreads();
    const int32_t of_warps = scan_lanes<kWarp>(lane < warps ? sums[lane] : 0, lane, Sum{});
    const int32_t earlier_warps = __shfl_sync(kFullWarp, of_warps, warp == 0 ? 0 : warp - 1);
    const int32_t end = carry + (warp == 0 ? 0 : earlier_warps) + within;
    if (expert < experts) {
      total_to_limit[expert] = end;
      before_to_first[expert] += end - kept;
    }
    carry += __shfl_sync(kFullWarp, of_warps, kWarp - 1);
    __syncthreads();
  }
}

// Replaces every warp's count of an expert's choices with the warp's first row for that expert.
PYMOE_DEVICE void counts_to_rows(int experts, const int32_t* first, int32_t* of_warps) {
  constexpr int kAtOnce = 4;  // counts read at once, before a write. Divides the warps
  const int threads = static_cast<int>(blockDim.x), warps = threads / kWarp;
  for (int64_t expert = threadIdx.x; expert < experts; expert += threads) {
    int32_t row = first[expert];
    for (int warp = 0; warp < warps; warp += kAtOnce) {
      int32_t* const counts = of_warps + static_cast<int64_t>(warp) * experts + expert;
      int32_t here[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) here[i] = counts[static_cast<int64_t>(i) * experts];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        counts[static_cast<int64_t>(i) * experts] = row;
        row += here[i];
      }
    }
  }
}

// --- the kernels ---

// Returns the memory of a block's counters.
template <bool kInShared>
PYMOE_DEVICE int32_t* block_counters(int32_t* shared, int32_t* workspace, int64_t tiles, int64_t words, int experts) {
  if constexpr (kInShared) return shared;
  return workspace + tiles * experts + static_cast<int64_t>(blockIdx.x) * words;  // after the histograms
}

template <typename Index, bool kInShared>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    count_kernel(const Index* PYMOE_RESTRICT named, int32_t* histograms, int64_t rows, int rounds, int experts) {
  PYMOE_DYNAMIC_SHARED(int32_t, shared);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  int32_t* const histogram = histograms + static_cast<int64_t>(blockIdx.x) * experts;
  int32_t* const counts = kInShared ? shared : histogram;
  for (int64_t expert = thread; expert < experts; expert += threads) counts[expert] = 0;
  __syncthreads();
  const int64_t tile = static_cast<int64_t>(rounds) * threads, begin = blockIdx.x * tile;
  const int64_t end = begin + tile < rows ? begin + tile : rows;
#pragma unroll 4
  for (int64_t i = begin + thread; i < end; i += threads) {
    const int expert = expert_of(named[i], experts);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  if constexpr (kInShared) {
    __syncthreads();
    for (int64_t expert = thread; expert < experts; expert += threads) histogram[expert] = counts[expert];
  }
}

// Declares that one block per multiprocessor is enough: otherwise ptxas makes room for two on sm_80, and spills.
template <typename Index, bool kInShared, bool kOneLaunch>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    place_kernel(const Index* PYMOE_RESTRICT named, int32_t* slot, int32_t* token, int32_t* offsets, int32_t* workspace,
                 int64_t rows, int64_t choices, int rounds, int64_t tiles, int experts, int64_t capacity) {
  PYMOE_DYNAMIC_SHARED(int32_t, shared);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / kWarp, lane = thread % kWarp, warps = threads / kWarp;
  const Tile tile{static_cast<int64_t>(blockIdx.x) * rounds * threads, rounds};
  const int64_t words = static_cast<int64_t>(warps + 2) * experts;
  int32_t* const of_warps = block_counters<kInShared>(shared + kScanWords, workspace, tiles, words, experts);
  int32_t* const limit = of_warps + static_cast<int64_t>(warps) * experts;
  int32_t* const first = limit + experts;

  if constexpr (kOneLaunch) {
    count_all(named, static_cast<int>(rows), static_cast<int>(tile.begin), experts, of_warps, limit, first);
  } else {
    sum_histograms(workspace, tiles, blockIdx.x, experts, limit, first);
  }
  int32_t* const of_warp = of_warps + static_cast<int64_t>(warp) * experts;
  for (int64_t expert = lane; expert < experts; expert += kWarp) of_warp[expert] = 0;
  scan_experts(experts, capacity, shared, limit, first);

  for (int round = 0; round < rounds; ++round) {
    const int64_t i = tile.place(round);
    const int expert = i < rows ? expert_of(named[i], experts) : -1;
    if (expert >= 0) atomicAdd(&of_warp[expert], 1);
  }
  __syncthreads();
  counts_to_rows(experts, first, of_warps);
  __syncthreads();

  const auto expert_in = [&](int round) {
    const int64_t i = tile.place(round);
    return round < rounds && i < rows ? expert_of(named[i], experts) : -1;
  };
  int next = expert_in(0);
  for (int round = 0; round < rounds; ++round) {
    const int64_t i = tile.place(round);
    const int expert = next;
    next = expert_in(round + 1);  // loaded while this round's choices are placed
    const unsigned same = __match_any_sync(kFullWarp, expert);
    const int rank = __popc(same & ((1u << lane) - 1u));
    const int32_t row = expert >= 0 ? of_warp[expert] + rank : 0;
    __syncwarp(kFullWarp);
    if (expert >= 0 && rank == 0) of_warp[expert] += __popc(same);
    __syncwarp(kFullWarp);
    if (i >= rows) continue;  // safe: no collective follows in this round
    const bool kept = expert >= 0 && row < limit[expert];
    slot[i] = kept ? row : -1;
    if (kept) token[row] = static_cast<int32_t>(static_cast<uint32_t>(i) / static_cast<uint32_t>(choices));
  }

  const int32_t used = limit[experts - 1];
  for (int round = 0; round < rounds; ++round) {
    const int64_t row = tile.place(round);
    if (row >= used && row < rows) token[row] = -1;
  }
  if (blockIdx.x != 0) return;
  if (thread == 0) offsets[0] = 0;
  for (int64_t expert = thread; expert < experts; expert += threads) offsets[expert + 1] = limit[expert];
}

template <typename Index, bool kInShared>
void run(const BuildRoutingArguments& a, const Plan& plan, void* stream) {
  const int64_t rows = a.tokens * a.choices;
  const int threads = plan.warps * kWarp;
  constexpr int64_t kWord = sizeof(int32_t);
  const int64_t shared_bytes = kWord * (kScanWords + (kInShared ? plan.counters(a.num_experts) : 0));
  const auto place = [&](auto* kernel) {
    launch(kName, kernel, {plan.tiles, threads, shared_bytes}, stream, a.experts, a.slot, a.token, a.offsets,
           a.workspace, rows, a.choices, plan.rounds, plan.tiles, a.num_experts, a.capacity);
  };
  if constexpr (kInShared) {
    if (plan.one_launch) return place(&place_kernel<Index, true, true>);
  }
  launch(kName, count_kernel<Index, kInShared>, {plan.tiles, threads, kWord * (kInShared ? a.num_experts : 1)}, stream,
         a.experts, a.workspace, rows, plan.rounds, a.num_experts);
  place(&place_kernel<Index, kInShared, false>);
}

}  // namespace

int64_t build_routing_workspace(int64_t rows, int64_t num_experts) {
  const Plan plan = make_plan(rows, num_experts);
  if (plan.one_launch) return 0;
  return plan.tiles * (num_experts + (plan.in_shared ? 0 : plan.counters(num_experts)));
}

void build_routing(const BuildRoutingArguments& a, void* stream) {
  const Plan plan = make_plan(a.tokens * a.choices, a.num_experts);
  if (a.wide) {
    plan.in_shared ? run<int64_t, true>(a, plan, stream) : run<int64_t, false>(a, plan, stream);
  } else {
    plan.in_shared ? run<int32_t, true>(a, plan, stream) : run<int32_t, false>(a, plan, stream);
  }
}

}  // namespace pymoe::cuda
