// TaskPool of pymoe._runtime: where Python's clients submit tensors. submit_task is a function of CPython's own calling
// convention: pybind11 would take longer to read its arguments than the queue takes.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

#include <memory>

namespace pymoe::bindings {

// The pool of a TaskPool of this process. Throws a TypeError for anything else.
std::shared_ptr<Pool> pool_of(PyObject* object, const char* where);

}  // namespace pymoe::bindings
