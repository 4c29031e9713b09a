// Tests in which order group_plan.h gives tiles to blocks, by counting what blocks that run at the same time read. A
// GPU starts blocks in the order of their numbers. So about kWave consecutive ones run together, and what they have in
// common is read from memory once, into the L2 cache.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_on_cpu/harness.h"
#include "kernels/cuda/group_plan.h"
#include "kernels/cuda/tensor_tile.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

constexpr int kMultiprocessors = 132;  // of an H100 or H200
constexpr int kWave = kMultiprocessors * cuda::kTensorBlocks<128>;

// Finds the tile of every block, as the blocks of a product do.
__global__ void find_tiles_kernel(cuda::GroupPlan plan, int experts, int64_t rows, unsigned blocks,
                                  unsigned column_tiles, cuda::GroupTile* tiles) {
  for (unsigned block = 0; block < blocks; ++block) {
    const cuda::GroupTile tile = cuda::find_tile(plan, experts, rows, 128, block, column_tiles);
    if (threadIdx.x == 0) tiles[block] = tile;
  }
}

// Returns the tiles of 128 x 128 of a product in the order of their blocks. `loads`: the number of rows of each expert.
std::vector<cuda::GroupTile> tiles_of(const std::vector<int64_t>& loads, int64_t output_features) {
  const auto experts = static_cast<int64_t>(loads.size());
  Buffer<int32_t> offsets(experts + 1), workspace(2 * (experts + 1));
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e + 1] = offsets[e] + static_cast<int32_t>(loads[static_cast<size_t>(e)]);
  }
  const int64_t rows = offsets[experts], columns = cuda::ceil_div(output_features, 128);
  const int64_t blocks = cuda::most_row_tiles(rows, experts, 128) * columns;
  const cuda::GroupPlan plan = cuda::group_plan(workspace.data(), experts);
  std::vector<cuda::GroupTile> tiles(static_cast<size_t>(blocks));
  cuda::launch("emulator: plan", cuda::plan_groups_kernel, {1, cuda::kPlanThreads}, nullptr, offsets.data(), plan,
               experts, rows, 128);
  cuda::launch("emulator: find tiles", find_tiles_kernel, {1, cuda::kWarp}, nullptr, plan, experts, rows, blocks,
               columns, tiles.data());
  std::erase_if(tiles, [](const cuda::GroupTile& tile) { return tile.rows == 0; });
  return tiles;
}

// The weight's tile and the rows' tile that a block reads.
std::pair<int, int> weight_tile(const cuda::GroupTile& tile) { return {tile.expert, tile.column}; }
std::pair<int, int64_t> row_tile(const cuda::GroupTile& tile) { return {tile.expert, tile.first}; }

// Returns the largest number of different tiles among kWave consecutive blocks, from any block on.
template <typename Of>
int64_t most_in_a_wave(const std::vector<cuda::GroupTile>& tiles, Of of) {
  std::map<decltype(of(tiles[0])), int> counts;
  size_t most = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    ++counts[of(tiles[i])];
    if (i >= kWave && --counts[of(tiles[i - kWave])] == 0) counts.erase(of(tiles[i - kWave]));
    most = std::max(most, counts.size());
  }
  return static_cast<int64_t>(most);
}

}  // namespace

TEST_CASE("group_plan: a wave of 264 blocks reads at most 34 tiles of the weight, if experts have 1,024 rows") {
  struct Product {
    std::string name;
    int64_t inputs, outputs;
    int64_t mebibytes;  // the most that a wave reads: tiles of 128 rows, of all inputs in 16 bits
  };
  static_assert(kWave == 264);
  const int64_t experts = kSlow ? 2 : 6, rows = 1024;
  for (const Product& product : {Product{"OLMoE, gate and up", 2048, 2048, 29},
                                 {"OLMoE, down", 1024, 2048, 15},
                                 {"Qwen3-30B-A3B, gate and up", 2048, 1536, 33},
                                 {"Qwen3-30B-A3B, down", 768, 2048, 11},
                                 {"DeepSeek-V3, gate and up", 7168, 4096, 88},
                                 {"DeepSeek-V3, down", 2048, 7168, 25},
                                 {"Mixtral-8x7B, gate and up", 4096, 28672, 50}}) {
    INFO(product.name);
    const auto tiles = tiles_of(std::vector<int64_t>(static_cast<size_t>(experts), rows), product.outputs);
    CHECK(static_cast<int64_t>(tiles.size()) == experts * rows / 128 * (product.outputs / 128));
    const int64_t of_weight = most_in_a_wave(tiles, weight_tile), of_rows = most_in_a_wave(tiles, row_tile);
    CHECK(of_weight <= 34);
    CHECK(of_rows <= 32);
    CHECK((of_weight + of_rows) * 128 * product.inputs * 2 <= product.mebibytes << 20);
  }
}

// With few rows an expert each tile of the weight must be read at least once. The plan adds a reading for each further
// band of 1,024 rows, and for each column that two waves divide between them.
TEST_CASE("group_plan: each tile of the weight is read once for every 1,024 rows of its expert, for any loads") {
  for_cases("group_plan", 6, [](Random& random) {
    const int64_t outputs = random.one_of<int64_t>({4096, 7168, 14336}), columns = outputs / 128;
    std::vector<int64_t> loads;  // some experts get many rows, some none
    for (int64_t e = random.between(1, size(20, 4)); e > 0; --e) {
      loads.push_back(random.chance(0.3) ? random.between(1024, size(4000, 1200)) : random.between(0, 300));
    }
    const auto tiles = tiles_of(loads, outputs);
    int64_t readings = 0, allowed = cuda::ceil_div(static_cast<int64_t>(tiles.size()), kWave);
    std::set<std::pair<int, int>> of_wave;
    for (size_t i = 0; i < tiles.size(); ++i) {
      if (i % kWave == 0) of_wave.clear();
      readings += of_wave.insert(weight_tile(tiles[i])).second;
    }
    for (const int64_t rows : loads) allowed += cuda::ceil_div(rows, 1024) * columns;
    CHECK(readings <= allowed);
  });
}
