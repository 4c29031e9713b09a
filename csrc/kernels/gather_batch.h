// gather_batch: many blocks of bytes, one after the other, in one copy.
//
//     out[starts[i] .. starts[i + 1]) = sources[i][0 .. starts[i + 1] - starts[i])
//
// Exact, any dtype. The CPU twin cuts the output, not the list, so many small tensors and one large one are spread
// over the threads alike.
#pragma once

#include <cstdint>

namespace pymoe {

struct GatherBatchArguments {
  const void* const* sources;  // (count,) pointers; where a block is empty its pointer is never used
  const int64_t* starts;       // (count + 1,) byte offsets in out, ascending from 0
  void* out;                   // starts[count] bytes
  int64_t count;
};

namespace cpu {
void gather_batch(const GatherBatchArguments& arguments);
}

}  // namespace pymoe
