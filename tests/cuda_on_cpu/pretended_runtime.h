// A stub of the CUDA runtime for launch_check.cu. As in CUDA, a kernel has one limit of shared memory for all threads,
// and an error is kept until it is read.
#pragma once

namespace pretended {

inline int launched = 0;
inline bool refuse_attribute = false;
inline void (*other_thread)() = nullptr;  // called once, after a thread sets the attribute and before its launch

}  // namespace pretended
