// The memory that batches are gathered into: one pool for the process, which outlives every tensor over it.
#pragma once

#include "runtime/buffer_pool.h"

namespace pymoe::bindings {

runtime::BufferPool& buffers();

}  // namespace pymoe::bindings
