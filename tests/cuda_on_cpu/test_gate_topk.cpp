// Tests gate_topk and its backward: the emulated CUDA kernels must give the CPU kernels' choices, and weights with the
// same bits.
#include <algorithm>

#include "cuda_on_cpu/harness.h"
#include "kernels/gate_topk.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

struct Shape {
  int64_t tokens, num_experts, choices;
};

enum class Logits { kNormal, kSpecial, kTied, kEqual, kAscending };

template <typename T>
void fill_logits(Buffer<T>& logits, int64_t num_experts, Logits kind, Random& random) {
  using S = accumulate_t<T>;
  fill(logits, random, kind == Logits::kSpecial ? 0.1 : 0.0);
  for (int64_t i = 0; i < logits.size(); ++i) {
    if (kind == Logits::kTied) logits[i] = round_to<T>(static_cast<S>(random.between(-2, 1)) / 2 * S{0.5});
    if (kind == Logits::kEqual) logits[i] = round_to<T>(random.chance(0.5) ? S{0} : -S{0});
    if (kind == Logits::kAscending) logits[i] = round_to<T>(static_cast<S>(i % num_experts) / 16);
  }
}

GateOptions random_options(Random& random) {
  return {random.one_of({Score::kSoftmax, Score::kSigmoid}), random.chance(0.6), random.one_of({1.0, 2.5, -0.5})};
}

// The outputs of a gate, in buffers of exactly their size.
template <typename T>
struct Outputs {
  Buffer<accumulate_t<T>> weights;
  Buffer<int32_t> experts, load;
  explicit Outputs(const Shape& s, int64_t shift = 0)
      : weights(s.tokens * s.choices, shift), experts(s.tokens * s.choices, shift), load(s.num_experts, shift) {}
  void write_from(GateTopkArguments& a) {
    a.weights = weights.data();
    a.experts = experts.data();
    a.load = load.data();
  }
};

// Checks a gate that counts the choices of each expert in each tile instead of the load; its choices must be the same.
template <typename T>
void check_counts(GateTopkArguments a, const Shape& s, const Outputs<T>& expected, Random& random) {
  a.counts = cuda::gate_topk_counts(a);
  const bool fits = s.tokens <= ChoiceCounts::kMostTokens && s.num_experts <= ChoiceCounts::kMostExperts;
  CHECK((a.counts.tiles > 0) == (fits && s.tokens > 0));
  if (!fits) return;
  Outputs<T> out(s, random.between(0, 3));
  Buffer<uint16_t> counts(a.counts.size());
  out.write_from(a);
  a.load = nullptr;
  a.counts.values = counts.data();
  cuda::gate_topk(a, nullptr);
  CHECK(out.experts.same(expected.experts));
  CHECK(same_values(out.weights, expected.weights));
  CHECK((out.experts.intact() && out.weights.intact() && counts.intact()));
  CHECK(a.counts.tiles * a.counts.tokens >= s.tokens);
  std::vector<uint16_t> wanted(static_cast<size_t>(a.counts.size()));
  for (int64_t i = 0; i < s.tokens * s.choices; ++i) {
    ++wanted[static_cast<size_t>(i / s.choices / a.counts.tokens * a.counts.stride + expected.experts[i])];
  }
  CHECK(std::equal(wanted.begin(), wanted.end(), counts.begin()));
}

template <typename T>
void check_gate(const Shape& s, Logits kind, bool biased, int64_t num_groups, int64_t topk_groups,
                const GateOptions& options, Random& random, int64_t most_blocks = 0) {
  using S = accumulate_t<T>;
  INFO("T ", s.tokens, " E ", s.num_experts, " K ", s.choices, " groups ", topk_groups, " of ", num_groups, " logits ",
       static_cast<int>(kind), " score ", static_cast<int>(options.score), " renormalize ", options.renormalize,
       " biased ", biased, " dtype ", static_cast<int>(dtype_of<T>()));
  Buffer<T> logits(s.tokens * s.num_experts, random.between(0, 3));
  Buffer<S> bias(s.num_experts);
  fill_logits(logits, s.num_experts, kind, random);
  fill(bias, random, kind == Logits::kSpecial ? 0.02 : 0.0);
  GateTopkArguments a{};
  a.dtype = dtype_of<T>();
  a.logits = logits.data();
  a.bias = biased ? bias.data() : nullptr;
  a.tokens = s.tokens;
  a.num_experts = s.num_experts;
  a.choices = s.choices;
  a.num_groups = num_groups;
  a.topk_groups = topk_groups;
  a.options = options;
  a.most_blocks = most_blocks;
  Outputs<T> expected(s), out(s, random.between(0, 3));
  expected.write_from(a);
  cpu::gate_topk(a);
  Buffer<unsigned char> workspace(cuda::gate_topk_workspace(a));
  a.workspace = workspace.data();
  out.write_from(a);
  cuda::gate_topk(a, nullptr);
  CHECK(out.experts.same(expected.experts));
  CHECK(out.load.same(expected.load));
  CHECK(same_values(out.weights, expected.weights));
  CHECK((out.experts.intact() && out.load.intact() && out.weights.intact() && workspace.intact()));
  check_counts<T>(a, s, expected, random);
}

template <typename T>
void check_backward(const Shape& s, Logits kind, bool on_logits, const GateOptions& options, Random& random) {
  using S = accumulate_t<T>;
  INFO("T ", s.tokens, " E ", s.num_experts, " K ", s.choices, " logits ", static_cast<int>(kind), " score ",
       static_cast<int>(options.score), " renormalize ", options.renormalize, " on logits ", on_logits, " dtype ",
       static_cast<int>(dtype_of<T>()));
  Buffer<T> logits(s.tokens * s.num_experts, random.between(0, 3));
  fill_logits(logits, s.num_experts, kind, random);
  Outputs<T> gate(s);
  GateTopkArguments forward{};
  forward.dtype = dtype_of<T>();
  forward.logits = logits.data();
  forward.tokens = s.tokens;
  forward.num_experts = s.num_experts;
  forward.choices = s.choices;
  forward.options = options;
  gate.write_from(forward);
  cpu::gate_topk(forward);
  if (!on_logits) {  // replace some experts, as a bias would
    for (int64_t i = 0; i < gate.experts.size(); ++i) {
      gate.experts[i] = static_cast<int32_t>((gate.experts[i] + s.num_experts / 2) % s.num_experts);
    }
  }
  Buffer<S> grad(s.tokens * s.choices, random.between(0, 3));
  fill(grad, random);
  Buffer<T> expected(s.tokens * s.num_experts), out(s.tokens * s.num_experts, random.between(0, 3));
  GateTopkBackwardArguments a{dtype_of<T>(), logits.data(), gate.experts.data(), grad.data(), expected.data(),
                              s.tokens,      s.num_experts, s.choices,           on_logits,   options};
  cpu::gate_topk_backward(a);
  Buffer<unsigned char> workspace(cuda::gate_topk_backward_workspace(a));
  a.workspace = workspace.data();
  a.grad_logits = out.data();
  cuda::gate_topk_backward(a, nullptr);
  CHECK(same_values(out, expected));
  CHECK((out.intact() && workspace.intact()));
  if constexpr (std::is_same_v<T, float>) {  // the same gradients, rounded to a narrower dtype
    Buffer<BFloat16> narrow(expected.size(), random.between(0, 3)), of_cpu(expected.size()), rounded(expected.size());
    for (int64_t i = 0; i < expected.size(); ++i) rounded[i] = round_to<BFloat16>(expected[i]);
    a.narrow = true;
    a.grad_logits = of_cpu.data();
    cpu::gate_topk_backward(a);
    a.grad_logits = narrow.data();
    cuda::gate_topk_backward(a, nullptr);
    CHECK(same_values(of_cpu, rounded));
    CHECK(same_values(narrow, rounded));
    CHECK(narrow.intact());
  }
}

int64_t random_divisor(int64_t of, Random& random) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= of; ++d) {
    if (of % d == 0) divisors.push_back(d);
  }
  return divisors[static_cast<size_t>(random.between(0, static_cast<int64_t>(divisors.size()) - 1))];
}

template <typename T>
void check_random_gate(Random& random) {
  const int64_t range = random.between(0, kSlow ? 3 : 7);
  const int64_t low = std::initializer_list<int64_t>{1, 9, 33, 65, 129, 257, 513, 1025}.begin()[range];
  const int64_t high = std::initializer_list<int64_t>{8, 32, 64, 128, 256, 512, 1024, 1600}.begin()[range];
  Shape s{random.between(0, size(high > 300 ? 6 : 40, 3)), random.chance(0.2) ? high : random.between(low, high), 0};
  const int64_t most = random.one_of<int64_t>({1, 2, 8, 8, 16, 70, s.num_experts});
  s.choices = std::min(s.num_experts, kSlow ? std::min<int64_t>(most, 8) : random.between(1, most));
  int64_t num_groups = 0, topk_groups = 0;
  if (random.chance(0.3)) {
    num_groups = random_divisor(s.num_experts, random);
    const int64_t group = s.num_experts / num_groups;
    topk_groups = random.between((s.choices + group - 1) / group, num_groups);
  }
  const auto kind = random.one_of(
      {Logits::kNormal, Logits::kNormal, Logits::kSpecial, Logits::kTied, Logits::kEqual, Logits::kAscending});
  check_gate<T>(s, kind, random.chance(0.3), num_groups, topk_groups, random_options(random), random,
                random.one_of<int64_t>({0, 1, 2}));
}

}  // namespace

TEST_CASE("gate_topk: the emulated kernel equals the CPU twin, bit for bit") {
  for_cases("gate_topk", 150, [](Random& random) {
    with_random_dtype(random, [&](auto tag) { check_random_gate<typename decltype(tag)::type>(random); });
  });
}

TEST_CASE("gate_topk: blocks that choose the same experts count together") {
  for_cases("gate_topk blocks", 4, [](Random& random) {
    check_gate<float>({20, 300, 3}, Logits::kEqual, false, 0, 0, random_options(random), random);
  });
}

TEST_CASE("gate_topk: a block scores the rows of one tile after those of another") {
  for_cases("gate_topk tiles", 4, [](Random& random) {
    const Shape s{size(80, 40), random.one_of<int64_t>({7, 20}), 2};
    check_gate<float>(s, Logits::kNormal, true, 0, 0, random_options(random), random, 1);
  });
}

TEST_CASE("gate_topk: rows that are scored, of more tokens than have 16 lanes each") {
  if (kSlow) return;
  for_cases("gate_topk many tokens", 2, [](Random& random) {
    const Shape s{4224 + random.between(1, 40), random.one_of<int64_t>({7, 40, 128}), random.between(1, 4)};
    check_gate<float>(s, Logits::kTied, true, 0, 0, random_options(random), random);
  });
}

TEST_CASE("gate_topk: rows too long for shared memory, and for counting in it") {
  if (kSlow) return;
  for_cases("gate_topk long", 6, [](Random& random) {
    const Shape s{random.between(1, 5), random.between(13000, 30000), random.between(1, 300)};
    check_gate<double>(s, Logits::kNormal, true, 0, 0, random_options(random), random, 2);
    check_gate<float>(s, Logits::kSpecial, false, 0, 0, random_options(random), random, 1);
    check_backward<float>(s, Logits::kNormal, false, random_options(random), random);
    check_backward<double>(s, Logits::kNormal, true, random_options(random), random);
  });
}

TEST_CASE("gate_topk_backward: the emulated kernel equals the CPU twin, bit for bit") {
  for_cases("gate_topk_backward", 120, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t most = random.one_of<int64_t>({8, 70, 300, size(1300, 300)});
      Shape s{random.between(0, size(40, 5)), random.between(1, most), 0};
      s.choices = random.between(1, std::min<int64_t>(s.num_experts, random.one_of<int64_t>({1, 8, 40, 400})));
      const auto kind = random.one_of({Logits::kNormal, Logits::kNormal, Logits::kSpecial, Logits::kEqual});
      check_backward<T>(s, kind, random.chance(0.5), random_options(random), random);
    });
  });
}

TEST_CASE("gate_topk_backward: experts that point outside touch nothing outside, and only their own token") {
  for_cases("gate_topk_backward hostile", 40, [](Random& random) {
    const Shape s{random.between(2, size(20, 4)), random.between(1, 40), random.between(1, 5)};
    Buffer<float> logits(s.tokens * s.num_experts), grad(s.tokens * s.choices);
    fill(logits, random);
    fill(grad, random);
    Buffer<int32_t> experts(s.tokens * s.choices);
    for (int32_t& expert : experts) expert = static_cast<int32_t>(random.between(0, s.num_experts - 1));
    Buffer<float> expected(s.tokens * s.num_experts), out(s.tokens * s.num_experts);
    GateTopkBackwardArguments a{
        DType::kFloat32, logits.data(), experts.data(), grad.data(),        expected.data(),
        s.tokens,        s.num_experts, s.choices,      random.chance(0.5), random_options(random)};
    cpu::gate_topk_backward(a);
    const int64_t hostile = random.between(0, s.tokens - 1);
    for (int64_t j = 0; j < s.choices; ++j) {
      const auto past = static_cast<int32_t>(s.num_experts);
      if (j == 0 || random.chance(0.5)) {
        experts[hostile * s.choices + j] = random.one_of<int32_t>({-1, past, past + 1, INT32_MIN, INT32_MAX});
      }
    }
    a.grad_logits = out.data();
    cuda::gate_topk_backward(a, nullptr);
    CHECK(out.intact());
    const auto row = static_cast<size_t>(s.num_experts) * sizeof(float);
    for (int64_t t = 0; t < s.tokens; ++t) {
      if (t != hostile) CHECK(memcmp(&out[t * s.num_experts], &expected[t * s.num_experts], row) == 0);
    }
  });
}
