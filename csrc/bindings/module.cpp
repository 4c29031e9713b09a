// The Python module pymoe._runtime.
#include "bindings/bind.h"
#include "bindings/errors.h"

// py::mod_gil_not_used is omitted on purpose: a free-threaded interpreter then enables its GIL, and much of this folder
// relies on the GIL.
PYBIND11_MODULE(_runtime, module) {
  using namespace pymoe::bindings;
  module.doc() = "The native runtime of pymoe.";
  module.attr("compiler") = __VERSION__;
  find_main_thread();
  find_cancelled_error();
  bind_process(module);
  bind_thread_state(module);
  bind_awaiting(module);
  bind_request_future(module);
  bind_batches(module);
  bind_task_pool(module);
  bind_executor(module);
  bind_fingerprints(module);
  bind_parameter_lock(module);
  bind_worker_pool(module);
  bind_profiler(module);
}
