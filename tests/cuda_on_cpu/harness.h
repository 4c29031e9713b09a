// Helpers for the tests of emulated kernels: random cases, buffers of exact size, and comparisons bit for bit.
//
//     TEST_CASE("combine: emulated kernel = CPU twin") {
//       for_cases("combine", 120, [](Random& random) { ... one random case, one or more launches ... });
//     }
//
// Under ThreadSanitizer a thread is thousands of times slower, so fewer cases run (cases()) and sizes are limited
// (size()), but every kernel is launched at least twelve times; main.cpp checks this.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpp/buffer.h"
#include "cpp/dtype_of.h"
#include "cuda_on_cpu/emulator.h"

namespace pymoe::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSlow = true;
#else
inline constexpr bool kSlow = false;
#endif

// Kernels in PTX (tests/cuda_ptx) use CUDA's logarithm and erfc; on the emulator they use the C library's, as the CPU
// kernels do.
#if defined(PYMOE_WATCHED_MEMORY)
inline constexpr bool kOwnFunctions = true;
#else
inline constexpr bool kOwnFunctions = false;
#endif

// PYMOE_EMULATED_SEED=n repeats a failing run; PYMOE_EMULATED_SCALE=10 runs ten times as many cases.
inline uint64_t base_seed() {
  const char* text = std::getenv("PYMOE_EMULATED_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}
inline int cases(int usual) {
  const char* text = std::getenv("PYMOE_EMULATED_SCALE");
  const double scale = text == nullptr ? 1.0 : std::strtod(text, nullptr);
  const int count = static_cast<int>(usual * scale);
  return kSlow ? std::min(count, 18) : count;
}
// Returns `usual`, or under ThreadSanitizer at most `slow`.
inline int64_t size(int64_t usual, int64_t slow) { return kSlow ? std::min(usual, slow) : usual; }

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) {  // both ends included
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return std::uniform_real_distribution<>()(engine_) < probability; }
  double number() { return std::normal_distribution<>()(engine_); }
  template <typename T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

template <typename F>
void for_cases(const char* name, int usual, F&& one_case) {
  for (int i = 0; i < cases(usual); ++i) {
    const uint64_t seed =
        base_seed() * 1000003 + static_cast<uint64_t>(i) * 7919 + std::hash<std::string>()(name) % 997;
    INFO(name, ", case ", i, " (PYMOE_EMULATED_SEED=", base_seed(), ")");
    emulator::set_seed(seed);
    Random random(seed);
    one_case(random);
  }
}

// Calls f(TypeTag<T>{}) for a random dtype.
template <typename F>
void with_random_dtype(Random& random, F&& f) {
  visit_dtype(random.one_of({DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}), f);
}

// Returns normal numbers, with some special ones.
template <typename T>
void fill(Buffer<T>& buffer, Random& random, double special = 0.0) {
  using S = accumulate_t<T>;
  for (T& value : buffer) {
    S number = static_cast<S>(random.number());
    if (special > 0 && random.chance(special)) {
      number = random.one_of<S>({std::numeric_limits<S>::quiet_NaN(), std::numeric_limits<S>::infinity(),
                                 -std::numeric_limits<S>::infinity(), S{0}, -S{0}, S{1}, S{1}});
    }
    value = round_to<T>(number);
  }
}

// Returns the greatest |a - b| / (absolute + relative * |b|) over the elements; a NaN equals a NaN, an infinity itself.
template <typename T>
double worst_error(const Buffer<T>& a, const Buffer<T>& b, double relative, double absolute) {
  double worst = 0;
  for (int64_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(to_accumulate(a[i])), y = static_cast<double>(to_accumulate(b[i]));
    if (x == y || (x != x && y != y)) continue;
    const double error = std::abs(x - y) / (absolute + relative * std::abs(y));
    worst = error == error ? std::max(worst, error) : std::numeric_limits<double>::infinity();
  }
  return worst;
}

// Compares bits, except those of a NaN, which depend on the order of a product's operands.
template <typename T>
bool same_values(const Buffer<T>& a, const Buffer<T>& b) {
  for (int64_t i = 0; i < a.size(); ++i) {
    const auto x = to_accumulate(a[i]), y = to_accumulate(b[i]);
    if (memcmp(&a[i], &b[i], sizeof(T)) != 0 && (x == x || y == y)) return false;
  }
  return a.size() == b.size();
}

// A range of addresses that uses memory only where it is touched, to test offsets past 2^31.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t bytes);
  ~SparseMemory();
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  void* data() const { return data_; }

 private:
  int64_t bytes_;
  void* data_;
};

}  // namespace pymoe::test
