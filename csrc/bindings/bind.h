// Functions that add the parts of the module pymoe._runtime. Each is defined in a file of this folder.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

void bind_awaiting(pybind11::module_& module);        // waits of coroutines for requests
void bind_batches(pybind11::module_& module);         // settings and counters of batches
void bind_executor(pybind11::module_& module);        // Executor, the threads of a Runtime
void bind_fingerprints(pybind11::module_& module);    // memory_fingerprints
void bind_parameter_lock(pybind11::module_& module);  // ParameterLock
void bind_process(pybind11::module_& module);         // ThreadIdentity; fork and exit
void bind_profiler(pybind11::module_& module);        // Profiled
void bind_request_future(pybind11::module_& module);  // RequestFuture
void bind_task_pool(pybind11::module_& module);       // TaskPool, QueueFull
void bind_thread_state(pybind11::module_& module);    // tells whether a thread is in its initial state
void bind_worker_pool(pybind11::module_& module);     // WorkerPool, Future, parallel_for

}  // namespace pymoe::bindings
