#include "bindings/buffers.h"

namespace pymoe::bindings {

runtime::BufferPool& buffers() {
  // Never destroyed: a tensor may let go of its memory when everything else has gone.
  static auto& pool = *new runtime::BufferPool(size_t{256} << 20);
  return pool;
}

PyObject* buffer_statistics(PyObject*, PyObject*) {
  const auto now = buffers().statistics();
  return Py_BuildValue("(LL)", static_cast<long long>(now.live_blocks), static_cast<long long>(now.cached_bytes));
}

}  // namespace pymoe::bindings
