// The calls of runtime/parallel_for.h with a Python function: pymoe._runtime.parallel_for.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

// After bind_worker_pool.
void bind_parallel_for(pybind11::module_& module);

}  // namespace pymoe::bindings
