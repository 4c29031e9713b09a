// Tests router_losses and its backward: the emulated CUDA kernels must give the CPU kernels' bits. (On a GPU, results
// differ by the rounding of CUDA's logarithm.)
#include "cuda_on_cpu/harness.h"
#include "kernels/router_losses.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

struct Options {
  int64_t tokens, experts, shift;
  bool wide, with_load, with_z;
  Score score;

  explicit Options(Random& random)
      : tokens(random.chance(0.2) ? random.between(65, size(300, 80)) : random.between(0, 64)),
        experts(random.one_of<int64_t>({1, 2, 7, 15, 16, 17, 33, random.between(1, 130)})),
        shift(random.chance(0.7) ? 0 : random.between(1, 7)),
        wide(random.chance(0.4)),
        with_load(random.chance(0.8)),
        with_z(random.chance(0.7)),
        score(random.one_of({Score::kSoftmax, Score::kSigmoid})) {}
};

// Returns a load of valid counts or of arbitrary values.
template <typename Count>
void fill_load(Buffer<Count>& load, Random& random) {
  const bool hostile = random.chance(0.2), empty = random.chance(0.1);
  for (Count& count : load) {
    count = static_cast<Count>(empty ? 0 : random.between(0, 500));
    if (hostile) {
      count = random.one_of<Count>({std::numeric_limits<Count>::min(), std::numeric_limits<Count>::max(), -1, 0,
                                    static_cast<Count>(random.engine()())});
    }
  }
}

template <typename T>
void compare(const Options& o, Random& random) {
  using S = accumulate_t<T>;
  Buffer<T> logits(o.tokens * o.experts, o.shift);
  fill(logits, random, random.one_of({0.0, 0.0, 0.01}));
  if (random.chance(0.2)) {  // logits far apart: scores underflow, and sums of sigmoids get the floor
    for (T& logit : logits) logit = round_to<T>(to_accumulate(logit) * S(random.one_of({30.0, 1000.0})) - S(100));
  }
  Buffer<int32_t> narrow_load(o.experts);
  Buffer<int64_t> wide_load(o.experts);
  fill_load(narrow_load, random);
  fill_load(wide_load, random);
  const void* const counts = o.wide ? static_cast<const void*>(wide_load.data()) : narrow_load.data();
  const void* const load = o.with_load ? counts : nullptr;

  Buffer<double> workspace(router_losses_workspace(o.tokens));
  Buffer<S> balance(1), z(1), expected_balance(1), expected_z(1);
  const RouterLossesInput input{dtype_of<T>(), logits.data(), o.tokens, o.experts, load, o.wide, o.with_z, o.score};
  RouterLossesArguments a{input, expected_balance.data(), expected_z.data(), workspace.data()};
  cpu::router_losses(a);
  a.balance = balance.data();
  a.z = z.data();
  cuda::router_losses(a, nullptr);
  CHECK(same_values(balance, expected_balance));
  constexpr auto kEpsilon = static_cast<double>(std::numeric_limits<S>::epsilon());
  CHECK((kOwnFunctions ? worst_error(z, expected_z, 4 * kEpsilon, 0) <= 1 : same_values(z, expected_z)));
  CHECK(workspace.intact());

  Buffer<S> grad_balance(1), grad_z(1);
  fill(grad_balance, random);
  fill(grad_z, random);
  Buffer<T> grad(logits.size(), o.shift), expected(logits.size());
  RouterLossesBackwardArguments b{input, grad_balance.data(), grad_z.data(), expected.data()};
  cpu::router_losses_backward(b);
  b.grad_logits = grad.data();
  cuda::router_losses_backward(b, nullptr);
  if (kOwnFunctions && o.with_z) {  // the rounding of a token's logarithm, times its factor in the gradient
    double greatest = std::log(static_cast<double>(o.experts));
    for (const T logit : logits) {
      const auto size = std::abs(static_cast<double>(to_accumulate(logit)));
      if (size < std::numeric_limits<double>::infinity()) greatest = std::max(greatest, size);
    }
    const double along_z =
        std::abs(static_cast<double>(grad_z[0])) / static_cast<double>(std::max<int64_t>(o.tokens, 1));
    const double last_bit = std::is_same_v<T, S> ? kEpsilon : std::ldexp(1.0, std::is_same_v<T, Float16> ? -10 : -7);
    CHECK(worst_error(grad, expected, last_bit, 16 * kEpsilon * along_z * greatest + 1e-7) <= 1);
  } else {
    CHECK(same_values(grad, expected));
  }
  CHECK(grad.intact());
}

}  // namespace

TEST_CASE("router_losses: the emulated kernels give the CPU twin's bits, forward and backward") {
  for_cases("router_losses", 70, [](Random& random) {
    const Options options(random);
    with_random_dtype(random, [&](auto tag) { compare<typename decltype(tag)::type>(options, random); });
  });
}

TEST_CASE("router_losses: more experts than a table of fractions holds") {
  for_cases("router_losses wide", 2, [](Random& random) {
    Options options(random);
    options.tokens = 3;
    options.experts = random.between(8200, 8300);
    options.with_load = true;
    with_random_dtype(random, [&](auto tag) { compare<typename decltype(tag)::type>(options, random); });
  });
}
