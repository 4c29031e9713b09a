// ThreadActivity: whether another thread does something, or waits.
//
// A thread that waits (for a lock, a socket, a time) uses no processor: its processor time stands still, to the
// nanosecond, and it is not ready to run. One that is ready and gets no processor on a busy machine does not wait.
#pragma once

#include <cstdint>

namespace pymoe::runtime {

class ThreadActivity {
 public:
  // Of a thread that has not started, which counts as one that does something.
  ThreadActivity() = default;
  static ThreadActivity of_this_thread();

  // Whether the thread, which must not have ended, has used a processor since this was asked last.
  bool advanced();
  // Whether it would use one if it got one, or does. Costs ten times as much.
  bool ready() const;

 private:
  int64_t thread_ = 0;  // as the system calls it; 0: nobody knows
  int64_t clock_ = 0;
  int64_t seen_ = -1;  // nanoseconds of processor time
};

}  // namespace pymoe::runtime
