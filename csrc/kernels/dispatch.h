// dispatch: copies every token's row to the rows of `out` that its choices own.
//
//     out[slot[t, k]] = x[t]     for every choice with slot[t, k] >= 0
//     out[s] = 0                 for rows s >= *used
//
// S, the number of rows of `out`, is T * K for a routing of all choices; an exchange may have fewer or more rows. A row
// below *used that no slot names is not written.
//
// Source-major: a token's row is read once and written K times, so a call moves (T + S) * row_bytes bytes. Rows are
// opaque bytes, so one kernel serves any dtype. Row offsets are 64-bit.
//
// `slot` must contain -1 (dropped) or a row in [0, S). The CPU twin throws std::out_of_range for other values; the CUDA
// twin skips such a choice. *used is clamped to [0, S]; an unused row is zero even if a slot names it. Neither ever
// writes outside `out`. Bytes are only copied, so the result is exact and, unless two choices name the same slot, the
// same for any number of threads. There is no workspace.
#pragma once

#include <cstdint>

namespace pymoe {

struct DispatchArguments {
  const void* x;        // (T, row_bytes)
  const int32_t* slot;  // (T, K)
  const int32_t* used;  // one value: the number of rows in use, offsets[E]
  void* out;            // (S, row_bytes)
  int64_t tokens;       // T
  int64_t choices;      // K
  int64_t rows;         // S
  int64_t row_bytes;    // H * element size
};

namespace cpu {
void dispatch(const DispatchArguments& arguments);
}

namespace cuda {
// Enqueues on `stream` (a cudaStream_t) and returns immediately; throws std::runtime_error if the launch is refused.
void dispatch(const DispatchArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
