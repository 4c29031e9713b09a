// Runs many schedules of one scenario: shared by the tests of the runtime's schedules.
//
// A failure names its seed. To see that schedule alone, step by step:
//
//     PYMOE_SEED=1234 build/cpp/plain/pymoe_tests --test-case="the scenario"
//
// PYMOE_SEEDS=1000000 runs a million schedules of every scenario instead.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>

#include "simulated.h"

namespace pymoe::simulation {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kShare = 5;  // sanitizers are slow, and the schedules are the same
#else
constexpr uint64_t kShare = 1;
#endif

// Runs `body` under the seeds below `seeds`, every third of them with stalls, one in 64 twice. The argument of `body`
// tells whether threads may stall: times are then no longer exact.
inline void run_schedules(uint64_t seeds, const std::function<void(bool stalls)>& body) {
  const auto run = [&body](uint64_t seed, bool trace) {
    const bool stalls = seed % 3 == 2;
    return simulate({.seed = seed, .stalls = stalls, .trace = trace}, [&] { body(stalls); });
  };
  if (const char* one = std::getenv("PYMOE_SEED")) {
    const Outcome outcome = run(std::strtoull(one, nullptr, 10), true);
    REQUIRE_MESSAGE(outcome.ok(), outcome.failure);
    return;
  }
  const char* const other = std::getenv("PYMOE_SEEDS");
  const uint64_t count = other ? std::strtoull(other, nullptr, 10) : seeds / kShare;
  for (uint64_t seed = 0; seed < count; ++seed) {
    const Outcome outcome = run(seed, false);
    REQUIRE_MESSAGE(outcome.ok(), outcome.failure);
    if (seed % 64 == 0) {
      const Outcome again = run(seed, false);
      REQUIRE_MESSAGE(again.hash == outcome.hash, "seed " << seed << " gave two different schedules");
    }
  }
}

}  // namespace pymoe::simulation
