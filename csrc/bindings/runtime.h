// Runtime of pymoe._runtime: the workers that serve a number of TaskPools.
#pragma once

#include "bindings/gil.h"

namespace pymoe::bindings {

// Adds the type to the module; throws ErrorSet.
void add_runtime_type(PyObject* module);

}  // namespace pymoe::bindings
