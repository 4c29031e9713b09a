// Tests build_routing: the emulated CUDA kernels must give the CPU kernel's results bit for bit.
#include <algorithm>

#include "cuda_on_cpu/harness.h"
#include "kernels/build_routing.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

struct Routing {
  Buffer<int32_t> slot, token, offsets;
  Routing(int64_t rows, int64_t experts) : slot(rows), token(rows), offsets(experts + 1) {}
  bool same(const Routing& other) const {
    return slot.same(other.slot) && token.same(other.token) && offsets.same(other.offsets);
  }
  bool intact() const { return slot.intact() && token.intact() && offsets.intact(); }
};

struct Sizes {
  int64_t tokens, choices, experts, capacity;
  int64_t rows() const { return tokens * choices; }
};

template <typename Index>
BuildRoutingArguments arguments(const Buffer<Index>& named, Routing& to, Buffer<int32_t>& workspace, const Sizes& s) {
  return {named.data(),     sizeof(Index) == 8, to.slot.data(), to.token.data(), to.offsets.data(),
          workspace.data(), s.tokens,           s.choices,      s.experts,       s.capacity};
}

// Either most choices go to few experts, as with an untrained router, or experts are equally likely.
template <typename Index>
void fill_experts(Buffer<Index>& named, Random& random, int64_t experts) {
  const int64_t popular = random.between(0, experts - 1);
  const double skew = random.one_of({0.0, 0.5, 1.0});
  for (Index& expert : named) {
    expert = static_cast<Index>(random.chance(skew) ? popular : random.between(0, experts - 1));
  }
}

template <typename Index>
void check_equal(Random& random, const Sizes& s) {
  Buffer<Index> named(s.rows(), random.between(0, 3));  // sometimes not aligned for a wide load
  fill_experts(named, random, s.experts);
  Routing expected(s.rows(), s.experts), got(s.rows(), s.experts);
  Buffer<int32_t> cpu_workspace(cpu::build_routing_workspace(s.rows(), s.experts));
  Buffer<int32_t> workspace(cuda::build_routing_workspace(s.rows(), s.experts));
  cpu::build_routing(arguments(named, expected, cpu_workspace, s));
  cuda::build_routing(arguments(named, got, workspace, s), nullptr);
  CHECK(got.same(expected));
  CHECK(got.intact());
  CHECK(workspace.intact());
}

void check_equal(Random& random, const Sizes& sizes) {
  INFO("T ", sizes.tokens, " K ", sizes.choices, " E ", sizes.experts, " capacity ", sizes.capacity);
  random.chance(0.3) ? check_equal<int64_t>(random, sizes) : check_equal<int32_t>(random, sizes);
}

int64_t random_capacity(Random& random, int64_t tokens, int64_t choices, int64_t experts) {
  const int64_t rows = tokens * choices;
  return random.one_of<int64_t>({rows, rows, rows / experts, rows / (2 * experts) + 1, 1, 0});
}

}  // namespace

TEST_CASE("build_routing: one launch equals the CPU twin") {
  for_cases("build_routing", 48, [](Random& random) {
    const int64_t choices = random.between(1, size(9, 4));
    // Sizes at, below and above a multiple of the tile, which is 512 or 1024 choices.
    const int64_t edge = random.one_of<int64_t>({0, 0, 512, 1024, size(2048, 1024), size(4096, 1024)});
    const int64_t tokens = std::max<int64_t>(0, edge / choices + random.between(-3, size(80, 20)));
    const int64_t experts =
        random.one_of<int64_t>({1, 2, 7, 64, 128, 160, 256, size(744, 8), size(745, 60), size(1406, 60)});
    check_equal(random, {tokens, choices, experts, random_capacity(random, tokens, choices, experts)});
  });
}

TEST_CASE("build_routing: two launches equal the CPU twin") {
  // Many choices or many experts take two launches. From 1407 experts on a block has fewer warps, and from 4219 on the
  // counters lie in the workspace.
  for_cases("build_routing two", 24, [](Random& random) {
    const int64_t choices = random.between(1, 4), tokens = random.between(0, size(700, 300));
    const int64_t experts = random.one_of<int64_t>({1407, 2531, 2532, 4218, 4219, 5000});
    check_equal(random, {tokens, choices, experts, random_capacity(random, tokens, choices, experts)});
  });
  if (kSlow) return;
  for (const int64_t experts : {160, 4219, 5000}) {  // 25 tiles or more; 2 or 3 of them
    for_cases("build_routing many", 1, [&](Random& random) {
      const int64_t choices = random.between(1, 8), tokens = (int64_t{49152} + random.between(1, 3000)) / choices + 1;
      check_equal(random, {tokens, choices, experts, random_capacity(random, tokens, choices, experts)});
    });
  }
}

TEST_CASE("build_routing: one launch for up to 49152 choices and 1406 experts, else two") {
  struct Case {
    int64_t rows, experts, launches;
  };
  for (const Case& c : {Case{0, 1, 1}, {9, 1406, 1}, {9, 1407, 2}, {49152, 1, 1}, {49153, 1, 2}}) {
    if (kSlow && c.rows > 100) continue;
    const auto launches = [] {
      const auto& all = emulator::launches();
      return all.contains("build_routing") ? all.at("build_routing") : 0;
    };
    const int64_t before = launches();
    Random random(static_cast<uint64_t>(c.rows + c.experts));
    check_equal<int32_t>(random, {c.rows, 1, c.experts, c.rows});
    CHECK(launches() - before == c.launches);
  }
}

TEST_CASE("build_routing: the same bits whatever the workspace held and whatever the order of blocks") {
  for_cases("build_routing again", 6, [](Random& random) {
    const Sizes sizes{random.between(1, size(900, 40)), 3, random.one_of<int64_t>({5, 1407, 4300}), 100};
    Buffer<int32_t> named(sizes.rows());
    fill_experts(named, random, sizes.experts);
    Routing first(sizes.rows(), sizes.experts), second(sizes.rows(), sizes.experts);
    Buffer<int32_t> workspace(cuda::build_routing_workspace(sizes.rows(), sizes.experts));
    for (int32_t& word : workspace) word = static_cast<int32_t>(random.between(INT32_MIN, INT32_MAX));
    cuda::build_routing(arguments(named, first, workspace, sizes), nullptr);
    cuda::build_routing(arguments(named, second, workspace, sizes), nullptr);
    CHECK(first.same(second));
  });
}

namespace {

// Returns the CPU kernel's result for the choices that name an expert; the others get -1.
template <typename Index>
void check_hostile(Random& random, const Sizes& s, std::initializer_list<int64_t> outside) {
  Buffer<Index> named(s.rows());
  fill_experts(named, random, s.experts);
  const double share = random.one_of({0.01, 0.3, 1.0});
  named[random.between(0, s.rows() - 1)] = static_cast<Index>(random.one_of(outside));
  for (Index& expert : named) {
    if (random.chance(share)) expert = static_cast<Index>(random.one_of(outside));
  }
  const auto valid = [&](int64_t i) {
    return static_cast<int64_t>(named[i]) >= 0 && static_cast<int64_t>(named[i]) < s.experts;
  };

  Routing got(s.rows(), s.experts);
  Buffer<int32_t> workspace(cuda::build_routing_workspace(s.rows(), s.experts));
  cuda::build_routing(arguments(named, got, workspace, s), nullptr);
  CHECK(got.intact());
  CHECK(workspace.intact());

  std::vector<int64_t> load(static_cast<size_t>(s.experts));
  for (int64_t i = 0; i < s.rows(); ++i) {
    if (valid(i)) ++load[static_cast<size_t>(named[i])];
  }
  int64_t wrong = got.offsets[0] != 0, end = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    end += std::min(load[static_cast<size_t>(e)], s.capacity);
    wrong += got.offsets[e + 1] != end;
  }
  std::vector<int64_t> place(static_cast<size_t>(s.experts));
  for (int64_t i = 0; i < s.rows(); ++i) {
    const int64_t before = valid(i) ? place[static_cast<size_t>(named[i])]++ : s.capacity;
    const bool kept = before < s.capacity;
    const int64_t row = kept ? got.offsets[named[i]] + before : -1;
    wrong += got.slot[i] != row;
    if (kept) wrong += got.token[row] != i / s.choices;
  }
  for (int64_t row = end; row < s.rows(); ++row) wrong += got.token[row] != -1;
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("build_routing: choices outside [0, E) are dropped, the others are as they would be") {
  for_cases("build_routing hostile", 30, [](Random& random) {
    const int64_t choices = random.between(1, 4), tokens = random.between(1, size(500, 30));
    const int64_t experts = random.one_of<int64_t>({1, 8, 200, 1407, 4300});
    const Sizes sizes{tokens, choices, experts,
                      std::max<int64_t>(1, random_capacity(random, tokens, choices, experts))};
    if (random.chance(0.5)) {
      check_hostile<int32_t>(random, sizes, {-1, -2, experts, experts + 1, INT32_MIN, INT32_MAX});
    } else {
      check_hostile<int64_t>(random, sizes,
                             {-1, experts, INT64_MIN, INT64_MAX, int64_t{1} << 32, (int64_t{1} << 32) + experts - 1,
                              -(int64_t{1} << 32), INT32_MIN});
    }
  });
}

namespace {

// The gate's counts of choices, by tiles of a given number of tokens.
struct Counted {
  ChoiceCounts counts;
  Buffer<uint16_t> values;

  Counted(const Buffer<int32_t>& named, const Sizes& s, int64_t tokens)
      : counts(sized(s, tokens)), values(counts.size()) {
    std::fill(values.begin(), values.end(), uint16_t{0});
    for (int64_t i = 0; i < s.rows(); ++i) ++values[i / s.choices / tokens * counts.stride + named[i]];
    counts.values = values.data();
  }

  static ChoiceCounts sized(const Sizes& s, int64_t tokens) {
    constexpr int64_t kPack = ChoiceCounts::kCountPack;
    return {nullptr, (s.tokens + tokens - 1) / tokens, tokens, (s.experts + kPack - 1) / kPack * kPack};
  }
};

}  // namespace

TEST_CASE("build_routing: the gate's counts give what the CPU twin gives, and the load") {
  for_cases("build_routing counted", 40, [](Random& random) {
    const int64_t experts =
        random.one_of<int64_t>({1, 2, 7, 60, 128, 129, 160, 256, size(744, 8), size(1021, 60), size(1024, 60)});
    const int64_t choices = random.between(1, std::min<int64_t>(experts, size(9, 4)));
    // One tile or many. With more than 128 tiles a block has several of them; a large tile takes several rounds.
    const int64_t tile = random.one_of<int64_t>({1, 8, 16, 32, size(100, 9)});
    const int64_t tokens = random.between(0, tile * random.one_of<int64_t>({1, 3, size(40, 4), size(140, 5)}));
    const Sizes s{tokens, choices, experts, random_capacity(random, tokens, choices, experts)};
    INFO("T ", tokens, " K ", choices, " E ", experts, " capacity ", s.capacity, " tile ", tile);
    Buffer<int32_t> named(s.rows());
    fill_experts(named, random, experts);
    for (int64_t i = 0; i < s.rows(); ++i) {  // choices of a token are distinct
      const int64_t first = i / choices * choices;
      while (std::find(named.begin() + first, named.begin() + i, named[i]) != named.begin() + i) {
        named[i] = static_cast<int32_t>((named[i] + 1) % experts);
      }
    }
    Routing expected(s.rows(), experts), got(s.rows(), experts);
    Buffer<int32_t> cpu_workspace(cpu::build_routing_workspace(s.rows(), experts)), none(0), load(experts);
    cpu::build_routing(arguments(named, expected, cpu_workspace, s));
    const Counted counted(named, s, tile);
    cuda::build_routing_counted({arguments(named, got, none, s), counted.counts, load.data()}, nullptr);
    CHECK(got.same(expected));
    CHECK((got.intact() && load.intact() && counted.values.intact()));
    int64_t wrong = 0;
    for (int64_t e = 0; e < experts; ++e) wrong += load[e] != std::count(named.begin(), named.end(), e);
    CHECK(wrong == 0);
  });
}
