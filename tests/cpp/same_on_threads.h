// Checks that a kernel gives the same bits for any number of threads, and writes nothing outside its outputs.
#pragma once

#include <doctest/doctest.h>

#include <random>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "buffer.h"
#include "core/dtype.h"
#include "dtype_of.h"
#include "thread_backend.h"

namespace pymoe::test {

template <typename... T>
bool same(const std::tuple<Buffer<T>...>& a, const std::tuple<Buffer<T>...>& b) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return (std::get<i>(a).same(std::get<i>(b)) && ...);
  }(std::index_sequence_for<T...>{});
}

// Runs a kernel on 1, 2 and 4 threads: `run(outputs...)` calls it on Buffer outputs that `make()` returns as a tuple.
// Returns the outputs of one thread.
template <typename Make, typename Run>
auto same_on_threads(const Make& make, const Run& run) {
  auto serial = make();
  {
    const WithThreads backend(1);
    std::apply(run, serial);
  }
  std::apply([](const auto&... output) { CHECK((output.intact() && ...)); }, serial);
  for (const int threads : {2, 4}) {
    const WithThreads backend(threads);
    auto parallel = make();
    std::apply(run, parallel);
    std::apply([](const auto&... output) { CHECK((output.intact() && ...)); }, parallel);
    CHECK(same(serial, parallel));
  }
  return serial;
}

template <typename T>
std::vector<T> random_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) {
    value = round_to<T>(static_cast<accumulate_t<T>>(static_cast<int>(random() % 4001) - 2000) / 500);
  }
  return values;
}

}  // namespace pymoe::test
