// The lanes of runtime/lanes.h: pymoe._runtime.LanePlan and LaneRun.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

void bind_lanes(pybind11::module_& module);

}  // namespace pymoe::bindings
