// TaskPool of pymoe._runtime: where Python's clients submit tensors. A type of CPython's own making, as RequestFuture
// is.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

#include <memory>

namespace pymoe::bindings {

// Adds TaskPool and QueueFull to the module; throws ErrorSet.
void add_task_pool_type(PyObject* module);

// The pool of a TaskPool of this process. Throws ErrorSet with a TypeError for anything else.
std::shared_ptr<Pool> pool_of(PyObject* object, const char* where);

}  // namespace pymoe::bindings
