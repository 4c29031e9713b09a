// Installs torch's intra-op pool as the backend of the CPU kernels, so that torch.set_num_threads governs them and
// they share threads with the operators around them.
#include <torch/csrc/stable/ops.h>

#include "kernels/cpu/parallel.h"

namespace pymoe::ops {
namespace {

const bool installed = [] {
  cpu::set_parallel_backend({
      [](int64_t begin, int64_t end, int64_t grain, cpu::RangeFunction function, void* context) {
        torch::stable::parallel_for(begin, end, grain, [=](int64_t range_begin, int64_t range_end) {
          function(range_begin, range_end, context);
        });
      },
      [] { return static_cast<int>(torch::stable::get_num_threads()); },
  });
  return true;
}();

}  // namespace
}  // namespace pymoe::ops
