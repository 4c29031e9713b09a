#include "bindings/buffers.h"

namespace pymoe::bindings {

runtime::BufferPool& buffers() {
  // Never destroyed: a tensor may let go of its memory when everything else has gone.
  static auto& pool = *new runtime::BufferPool(size_t{256} << 20);
  return pool;
}

}  // namespace pymoe::bindings
