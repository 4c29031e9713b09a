#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "thread_backend.h"

using pymoe::test::WithThreads;
namespace cpu = pymoe::cpu;

TEST_CASE("parallel_for covers every index once") {
  for (const int threads : {1, 2, 4, 7}) {
    const WithThreads backend(threads);
    for (const int64_t size : {0, 1, 2, 63, 64, 65, 1000}) {
      for (const int64_t grain : {1, 10, 5000}) {
        std::vector<int> seen(static_cast<size_t>(size));
        cpu::parallel_for(0, size, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
        });
        CHECK(seen == std::vector<int>(static_cast<size_t>(size), 1));
      }
    }
  }
}

TEST_CASE("parallel_for takes a range that does not begin at zero, and an empty one") {
  const WithThreads backend(3);
  std::atomic<int64_t> sum{0};
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  };
  cpu::parallel_for(10, 20, 1, add);
  CHECK(sum == 145);
  cpu::parallel_for(20, 10, 1, add);
  CHECK(sum == 145);
}

TEST_CASE("parallel_tasks hands out every task once") {
  for (const int threads : {1, 2, 4}) {
    const WithThreads backend(threads);
    std::vector<int> seen(501);
    cpu::parallel_tasks(501, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
    CHECK(seen == std::vector<int>(501, 1));
  }
}

TEST_CASE("an exception reaches the caller after all ranges have ended") {
  const WithThreads backend(4);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<int> ended{0};
    CHECK_THROWS_AS(cpu::parallel_for(0, 4, 1,
                                      [&](int64_t begin, int64_t) {
                                        ++ended;
                                        if (begin % 2 == 0) throw std::out_of_range("planted");
                                      }),
                    std::out_of_range);
    CHECK(ended == 4);
  }
}

TEST_CASE("without a backend loops run on the calling thread") {
  CHECK(cpu::num_threads() == 1);
  int64_t covered = 0;
  cpu::parallel_for(0, 100, 1, [&](int64_t begin, int64_t end) { covered += end - begin; });
  CHECK(covered == 100);
}
