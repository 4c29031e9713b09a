// The task graph of runtime/task_graph.h with Python functions as nodes: pymoe._runtime.TaskGraph and GraphRun.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

// After bind_worker_pool.
void bind_task_graph(pybind11::module_& module);

}  // namespace pymoe::bindings
