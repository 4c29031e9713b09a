// The memory that batches are gathered into: one pool for the process, which outlives every tensor over it.
#pragma once

#include "bindings/gil.h"
#include "runtime/buffer_pool.h"

namespace pymoe::bindings {

runtime::BufferPool& buffers();

// buffer_statistics(), a function of the module: (blocks live, bytes cached).
PyObject* buffer_statistics(PyObject* module, PyObject*);

}  // namespace pymoe::bindings
