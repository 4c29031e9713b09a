// A CUDA runtime of the tests, for one program (launch_check.cu). It keeps the rules that count there: the most shared
// memory that a kernel may be given is one number, whoever sets it, and an error is remembered until it is asked for.
#pragma once

namespace pretended {

inline int launched = 0;
inline bool refuse_attribute = false;
inline void (*other_thread)() = nullptr;  // once, between a thread's attribute and its launch

}  // namespace pretended
