// pymoe._runtime.PipelinePlan and PipelineRun, of runtime/pipeline_run.h.
#pragma once

#include <pybind11/pybind11.h>

namespace pymoe::bindings {

void bind_pipeline_run(pybind11::module_& module);

}  // namespace pymoe::bindings
