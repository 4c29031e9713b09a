// Operators that are linked only into the sanitized build. They count the threads on which kernels run, and contain
// deliberate faults, which prove that the sanitizers report such faults.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "kernels/cpu/parallel.h"
#include "kernels/dispatch.h"

namespace pymoe::probe {
namespace {

using torch::stable::Tensor;

std::mutex mutex;
std::set<std::thread::id> threads;
cpu::ParallelBackend observed{nullptr, nullptr};

struct Call {
  cpu::RangeFunction function;
  void* context;
};

void run_observed(int64_t begin, int64_t end, int64_t grain, cpu::RangeFunction function, void* context) {
  Call call{function, context};
  observed.run(
      begin, end, grain,
      [](int64_t range_begin, int64_t range_end, void* opaque) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          threads.insert(std::this_thread::get_id());
        }
        const auto& inner = *static_cast<Call*>(opaque);
        inner.function(range_begin, range_end, inner.context);
      },
      &call);
}

// Makes every parallel loop of a kernel record the threads that take part, and clears the record.
void observe_threads() {
  if (observed.run == nullptr) {
    observed = cpu::parallel_backend();
    cpu::set_parallel_backend({run_observed, observed.num_threads});
  }
  const std::lock_guard<std::mutex> lock(mutex);
  threads.clear();
}

int64_t count_threads() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int64_t>(threads.size());
}

// Passes the kernel twice as many tokens as x has rows, so that it reads past the end of x.
void read_past_end(const Tensor& x, const Tensor& slot, const Tensor& used, Tensor out) {
  cpu::dispatch({
      x.const_data_ptr(),
      static_cast<const int32_t*>(slot.const_data_ptr()),
      static_cast<const int32_t*>(used.const_data_ptr()),
      out.mutable_data_ptr(),
      2 * x.size(0),
      slot.size(1),
      out.size(0),
      x.size(1) * static_cast<int64_t>(x.element_size()),
  });
}

int64_t overflow(int64_t value) { return std::numeric_limits<int64_t>::max() - 1 + value; }

STABLE_TORCH_LIBRARY(pymoe_probe, library) {
  library.def("observe_threads() -> ()");
  library.def("count_threads() -> int");
  library.def("read_past_end(Tensor x, Tensor slot, Tensor used, Tensor(a!) out) -> ()");
  library.def("overflow(int value) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pymoe_probe, CompositeExplicitAutograd, library) {
  library.impl("observe_threads", TORCH_BOX(&observe_threads));
  library.impl("count_threads", TORCH_BOX(&count_threads));
  library.impl("read_past_end", TORCH_BOX(&read_past_end));
  library.impl("overflow", TORCH_BOX(&overflow));
}

}  // namespace
}  // namespace pymoe::probe
