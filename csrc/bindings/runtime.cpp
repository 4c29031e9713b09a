// The Python module pymoe._runtime: the only file that includes pybind11. No torch header comes here.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_runtime, module, py::mod_gil_not_used()) {
  module.doc() = "The native runtime of pymoe.";
  module.attr("compiler") = __VERSION__;
}
