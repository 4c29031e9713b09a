#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {
namespace {

ParallelBackend backend{
    [](int64_t begin, int64_t end, int64_t, RangeFunction function, void* context) { function(begin, end, context); },
    [] { return 1; },
};

}  // namespace

const ParallelBackend& parallel_backend() { return backend; }
void set_parallel_backend(const ParallelBackend& replacement) { backend = replacement; }

}  // namespace pymoe::cpu
