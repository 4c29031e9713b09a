// The Python module pymoe._runtime.
#include <pybind11/pybind11.h>

#include "bindings/gil.h"
#include "bindings/process.h"
#include "bindings/worker_pool.h"

namespace py = pybind11;

PYBIND11_MODULE(_runtime, module, py::mod_gil_not_used()) {
  using namespace pymoe::bindings;
  module.doc() = "The native runtime of pymoe.";
  module.attr("compiler") = __VERSION__;

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ErrorSet&) {  // Python's own: it is set already
    }
  });
  try {
    install_process_hooks();
  } catch (const ErrorSet&) {
    throw py::error_already_set();
  }
  bind_worker_pool(module);
}
