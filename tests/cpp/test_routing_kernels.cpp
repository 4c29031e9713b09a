// Tests build_routing, combine and gather_batch: compares them with plain loops, on several threads, and with invalid
// indices.
#include <doctest/doctest.h>

#include <climits>
#include <stdexcept>

#include "kernels/build_routing.h"
#include "kernels/combine.h"
#include "kernels/gather_batch.h"
#include "same_on_threads.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

std::vector<int32_t> random_experts(int64_t count, int64_t num_experts, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> experts(static_cast<size_t>(count));
  for (auto& expert : experts) expert = static_cast<int32_t>(random() % static_cast<unsigned>(num_experts));
  return experts;
}

auto routing_of(const std::vector<int32_t>& experts, int64_t choices, int64_t num_experts, int64_t capacity) {
  const auto rows = static_cast<int64_t>(experts.size());
  return same_on_threads(
      [&] { return std::tuple(Buffer<int32_t>(rows), Buffer<int32_t>(rows), Buffer<int32_t>(num_experts + 1)); },
      [&](auto& slot, auto& token, auto& offsets) {
        Buffer<int32_t> workspace(cpu::build_routing_workspace(rows, num_experts));
        cpu::build_routing({experts.data(), false, slot.data(), token.data(), offsets.data(), workspace.data(),
                            rows / choices, choices, num_experts, capacity});
        CHECK(workspace.intact());
      });
}

template <typename T>
void check_combine(int64_t tokens, int64_t choices, int64_t hidden) {
  const int64_t rows = tokens * choices;
  const auto experts = random_experts(rows, 8, 3);
  const auto [slot, token, offsets] = routing_of(experts, choices, 8, rows / 10 + 1);
  const auto y = random_values<T>(rows * hidden, 1), grad = random_values<T>(tokens * hidden, 2);
  const auto weights = random_values<accumulate_t<T>>(rows, 3);

  const CombineInput input{y.data(), slot.data(), weights.data(), tokens, choices, rows, hidden, dtype_of<T>()};
  const auto [out] = same_on_threads([&] { return std::tuple(Buffer<T>(tokens * hidden)); },
                                     [&](auto& result) { cpu::combine({input, result.data()}); });
  int64_t wrong = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < hidden; ++h) {
      accumulate_t<T> sum = 0;
      for (int64_t k = 0; k < choices; ++k) {
        const int64_t row = slot[t * choices + k];
        if (row < 0) continue;
        const accumulate_t<T> product =
            weights[static_cast<size_t>(t * choices + k)] * to_accumulate(y[static_cast<size_t>(row * hidden + h)]);
        sum += product;
      }
      wrong += to_accumulate(out[t * hidden + h]) != to_accumulate(round_to<T>(sum));
    }
  }
  CHECK(wrong == 0);

  same_on_threads([&] { return std::tuple(Buffer<T>(rows * hidden), Buffer<accumulate_t<T>>(rows)); },
                  [&](auto& dy, auto& dweights) {
                    cpu::combine_backward({input, grad.data(), offsets.data() + 8, dy.data(), dweights.data()});
                  });
}

}  // namespace

TEST_CASE("build_routing sorts stably, on any number of threads") {
  for (const int64_t num_experts : {1, 3, 64, 257}) {
    for (const int64_t capacity : {0, 5, 1 << 20}) {
      const auto experts = random_experts(3000 * 2, num_experts, 5);
      const auto [slot, token, offsets] = routing_of(experts, 2, num_experts, capacity);
      std::vector<int32_t> next(static_cast<size_t>(num_experts));
      int64_t wrong = 0;
      for (size_t i = 0; i < experts.size(); ++i) {
        const int32_t expert = experts[i], place = next[static_cast<size_t>(expert)]++;
        const int32_t expected = place < capacity ? offsets[expert] + place : -1;
        wrong += slot[static_cast<int64_t>(i)] != expected;
        if (expected >= 0) wrong += token[expected] != static_cast<int32_t>(i / 2);
      }
      for (int64_t row = offsets[num_experts]; row < 6000; ++row) wrong += token[row] != -1;
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("build_routing refuses an expert outside [0, E)") {
  for (const int32_t hostile : {-1, 8, INT_MAX, INT_MIN}) {
    auto experts = random_experts(400, 8, 6);
    experts[311] = hostile;
    const WithThreads backend(4);
    Buffer<int32_t> slot(400), token(400), offsets(9), workspace(cpu::build_routing_workspace(400, 8));
    CHECK_THROWS_AS(cpu::build_routing({experts.data(), false, slot.data(), token.data(), offsets.data(),
                                        workspace.data(), 200, 2, 8, 400}),
                    std::out_of_range);
    CHECK(slot.intact());
    CHECK(token.intact());
    CHECK(offsets.intact());
    CHECK(workspace.intact());
  }
}

TEST_CASE("combine adds in the order of the choices, on any number of threads") {
  check_combine<float>(100, 2, 37);
  check_combine<BFloat16>(64, 8, 128);
  check_combine<Float16>(33, 3, 1);
  check_combine<double>(20, 4, 65);
}

TEST_CASE("combine refuses a slot outside [-1, S)") {
  const auto y = random_values<float>(20 * 16, 1);
  for (const int32_t hostile : {-2, 20, INT_MAX, INT_MIN}) {
    std::vector<int32_t> slot(20, 0);
    slot[7] = hostile;
    const WithThreads backend(4);
    Buffer<float> out(10 * 16);
    CHECK_THROWS_AS(cpu::combine({{y.data(), slot.data(), nullptr, 10, 2, 20, 16, DType::kFloat32}, out.data()}),
                    std::out_of_range);
    CHECK(out.intact());
  }
}

TEST_CASE("gather_batch joins blocks, empty ones included") {
  const auto bytes = random_values<float>(100000, 9);
  std::vector<const void*> sources;
  std::vector<int64_t> starts{0};
  for (int64_t i = 0; i < 300; ++i) {
    const int64_t size = i % 7 == 0 ? 0 : (i * 37) % 1200;
    sources.push_back(size ? bytes.data() + i * 3 : nullptr);
    starts.push_back(starts.back() + size);
  }
  const auto [out] =
      same_on_threads([&] { return std::tuple(Buffer<unsigned char>(starts.back())); },
                      [&](auto& result) { cpu::gather_batch({sources.data(), starts.data(), result.data(), 300}); });
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto size = static_cast<size_t>(starts[i + 1] - starts[i]);
    if (size) CHECK(memcmp(out.data() + starts[i], sources[i], size) == 0);
  }
}
