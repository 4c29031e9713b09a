// A parallel backend of plain threads for tests: every range of a loop gets its own thread, and all threads start at
// the same moment, so that a race between ranges is likely to show.
#pragma once

#include <algorithm>
#include <atomic>
#include <latch>
#include <thread>
#include <vector>

#include "kernels/cpu/parallel.h"

namespace pymoe::test {

inline std::atomic<int> backend_threads{1};

inline void run_on_threads(int64_t begin, int64_t end, int64_t grain, cpu::RangeFunction function, void* context) {
  const int64_t size = end - begin;
  const int64_t pieces = std::clamp<int64_t>(size / std::max<int64_t>(grain, 1), 1, backend_threads.load());
  std::latch start(pieces);
  std::vector<std::thread> threads;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    threads.emplace_back([&, piece] {
      start.arrive_and_wait();
      function(begin + size * piece / pieces, begin + size * (piece + 1) / pieces, context);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// While an object of this class exists, kernels run on `threads` threads.
class WithThreads {
 public:
  explicit WithThreads(int threads) : before_(cpu::parallel_backend()) {
    backend_threads = threads;
    cpu::set_parallel_backend({run_on_threads, [] { return backend_threads.load(); }});
  }
  ~WithThreads() { cpu::set_parallel_backend(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  cpu::ParallelBackend before_;
};

}  // namespace pymoe::test
