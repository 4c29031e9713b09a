// ThreadActivity: tells whether another thread is active or waits.
//
// A thread that waits (for a lock, a socket, a time) uses no processor: its processor time does not change, and it is
// not ready to run. A thread that is ready but gets no processor on a busy machine counts as active.
#pragma once

#include <cstdint>

namespace pymoe::runtime {

class ThreadActivity {
 public:
  // Constructs the activity of a thread that has not started yet; such a thread counts as active.
  ThreadActivity() = default;
  static ThreadActivity of_this_thread();

  // Returns true if the thread has used a processor since the last call, or if this is the first call. The thread must
  // not have ended.
  bool advanced();
  // Returns true if the thread runs, or would if it got a processor. Reads a file, so it is slower than advanced().
  bool ready() const;

 private:
  int64_t thread_ = 0;  // the system's thread ID; 0: unknown
  int64_t clock_ = 0;
  int64_t seen_ = -1;  // nanoseconds of processor time
};

}  // namespace pymoe::runtime
