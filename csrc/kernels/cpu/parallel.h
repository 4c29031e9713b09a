// Parallel loops of the CPU kernels, which do not depend on torch.
//
// The kernels run on the installed backend: the operator library installs torch's own intra-op pool (ops/parallel.cpp),
// and a C++ test installs plain threads. Without a backend, loops run serially. A backend may cut [begin, end) into any
// ranges. So that results never depend on the number of threads, a kernel must compute every output element within a
// single range, or reduce over blocks of fixed size in an order that does not depend on the ranges.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace pymoe::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

struct ParallelBackend {
  // Calls `function` on disjoint ranges that cover [begin, end), each of at least `grain` indices if possible, and
  // returns when all calls have ended. `function` must not throw (parallel_for catches the exceptions of its body).
  void (*run)(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);
  int (*num_threads)();
};

const ParallelBackend& parallel_backend();
void set_parallel_backend(const ParallelBackend& backend);

inline int num_threads() { return parallel_backend().num_threads(); }

// Calls body(begin, end) on disjoint ranges that cover [begin, end). If calls throw, the first exception is rethrown on
// the calling thread after all of them have ended.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (end <= begin) return;
  if (end - begin <= grain) {
    body(begin, end);
    return;
  }
  struct Context {
    const Body& body;
    std::mutex mutex;
    std::exception_ptr error;
  } context{body, {}, nullptr};
  parallel_backend().run(
      begin, end, grain,
      [](int64_t range_begin, int64_t range_end, void* opaque) {
        auto& shared = *static_cast<Context*>(opaque);
        try {
          shared.body(range_begin, range_end);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(shared.mutex);
          if (!shared.error) shared.error = std::current_exception();
        }
      },
      &context);
  if (context.error) std::rethrow_exception(context.error);
}

// Calls body(i) for every i in [0, count). Threads take one i at a time, which suits a small number of tasks of
// unequal cost. If calls throw, the first exception is rethrown, as by parallel_for, and some i may be left out.
template <typename Body>
void parallel_tasks(int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t workers = count < num_threads() ? count : num_threads();
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    }
  });
}

}  // namespace pymoe::cpu
