// WorkerPool and Future of pymoe._runtime: Python functions on the runtime's worker threads.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

void bind_worker_pool(pybind11::module_& module);

}  // namespace pymoe::bindings
