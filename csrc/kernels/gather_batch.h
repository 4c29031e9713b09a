// gather_batch: copies many blocks of bytes into one, one after the other.
//
//     out[starts[i] .. starts[i + 1]) = sources[i][0 .. starts[i + 1] - starts[i])
//
// The copy is exact, for any dtype. Both twins cut the output, not the list, so many small tensors and one large one
// are distributed equally well over the threads.
//
// `sources` and `starts` are host memory for both twins; the memory at sources[i] and at `out` is memory of the device.
// The CUDA twin passes both tables to the kernel by value, and no longer needs them when it returns: one launch for up
// to 2000 blocks that are not empty, and one more for each further 2000 (250 if the toolkit is older than CUDA 12.1).
#pragma once

#include <cstdint>

namespace pymoe {

struct GatherBatchArguments {
  const void* const* sources;  // (count,) pointers; the pointer of an empty block is never used
  const int64_t* starts;       // (count + 1,) byte offsets in out, ascending from 0
  void* out;                   // starts[count] bytes
  int64_t count;
};

namespace cpu {
void gather_batch(const GatherBatchArguments& arguments);
}

namespace cuda {
// Enqueues on `stream` (a cudaStream_t) and returns immediately; throws std::runtime_error if a launch is refused.
void gather_batch(const GatherBatchArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
