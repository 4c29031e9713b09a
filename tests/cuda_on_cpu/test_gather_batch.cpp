// Tests gather_batch: the emulated CUDA kernel must give the CPU kernel's result byte for byte.
#include "cuda_on_cpu/harness.h"
#include "kernels/gather_batch.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

// Blocks in separate buffers, so that a sanitizer detects a read past any of them. `shift` is in bytes.
struct Blocks {
  std::vector<Buffer<unsigned char>> buffers;
  std::vector<const void*> sources;
  std::vector<int64_t> starts{0};

  void add(Random& random, int64_t bytes, int64_t shift) {
    buffers.emplace_back(bytes, shift);
    for (auto& byte : buffers.back()) byte = static_cast<unsigned char>(random.between(0, 255));
    sources.push_back(bytes > 0 ? buffers.back().data() : nullptr);
    starts.push_back(starts.back() + bytes);
  }
  GatherBatchArguments to(void* out) const {
    return {sources.data(), starts.data(), out, static_cast<int64_t>(sources.size())};
  }
};

void check_equal(const Blocks& blocks, int64_t out_shift) {
  Buffer<unsigned char> expected(blocks.starts.back()), out(blocks.starts.back(), out_shift);
  cpu::gather_batch(blocks.to(expected.data()));
  cuda::gather_batch(blocks.to(out.data()), nullptr);
  CHECK(out.same(expected));
  CHECK(out.intact());
}

int64_t launches_so_far() {
  const auto& launches = emulator::launches();
  const auto found = launches.find("gather_batch");
  return found == launches.end() ? 0 : found->second;
}

}  // namespace

TEST_CASE("gather_batch: the emulated kernel equals the CPU twin, byte for byte") {
  for_cases("gather_batch", 80, [](Random& random) {
    Blocks blocks;
    const int64_t count = random.between(1, size(40, 10)), unit = random.one_of<int64_t>({1, 2, 4, 8, 16, 64});
    const int64_t most = random.one_of<int64_t>({1, 4, 40, size(300, 20)}), shift = random.one_of<int64_t>({0, 0, 1});
    for (int64_t i = 0; i < count; ++i) {
      blocks.add(random, random.chance(0.2) ? 0 : unit * random.between(0, most), shift * unit * random.between(0, 3));
    }
    check_equal(blocks, random.one_of<int64_t>({0, 0, 0, 1, 2, 8, 15}));
  });
}

TEST_CASE("gather_batch: more than a block of the grid holds, in one tensor and in many") {
  for_cases("gather_batch large", 12, [](Random& random) {
    Blocks blocks;
    const int64_t bytes = random.one_of<int64_t>({16384, 16385, 16368, size(70000, 20000)});
    blocks.add(random, random.between(0, 40), 0);
    blocks.add(random, bytes, random.one_of<int64_t>({0, 0, 2, 4, 8, 3}));
    blocks.add(random, random.between(1, 40), 0);
    check_equal(blocks, random.one_of<int64_t>({0, 0, 8, 1}));
  });
}

TEST_CASE("gather_batch: one launch for up to 2000 blocks that are not empty, one more for each 2000 more") {
  if (kSlow) return;
  for (const int64_t count : {249, 250, 251, 1999, 2000, 2001, 4100}) {
    CAPTURE(count);
    Random random(static_cast<uint64_t>(count));
    Blocks blocks;
    for (int64_t i = 0; i < count; ++i) {
      if (i % 5 == 0) blocks.add(random, 0, 0);
      blocks.add(random, random.between(1, 6), 0);
    }
    const int64_t before = launches_so_far();
    check_equal(blocks, 0);
    CHECK(launches_so_far() - before == (count + 1999) / 2000);
  }
}

TEST_CASE("gather_batch: nothing to copy launches nothing") {
  const int64_t before = launches_so_far();
  Random random(1);
  Blocks blocks;
  for (int i = 0; i < 300; ++i) blocks.add(random, 0, 0);
  check_equal(blocks, 0);
  CHECK(launches_so_far() == before);
}
