// torch's profiler, carried to the threads that work for the one that is profiled.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

void bind_profiler(pybind11::module_& module);

}  // namespace pymoe::bindings
