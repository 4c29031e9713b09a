#include "runtime/activity.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

namespace pymoe::runtime {

ThreadActivity ThreadActivity::of_this_thread() {
  ThreadActivity activity;
  clockid_t clock;
  if (pthread_getcpuclockid(pthread_self(), &clock) != 0) return activity;
  activity.thread_ = syscall(SYS_gettid);
  activity.clock_ = clock;
  return activity;
}

bool ThreadActivity::advanced() {
  if (thread_ == 0) return true;
  timespec time;
  if (clock_gettime(static_cast<clockid_t>(clock_), &time) != 0) return true;
  const int64_t now = int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  return std::exchange(seen_, now) != now;
}

// Reads the state from the thread's stat file in /proc, where it follows the name in parentheses. State R means that
// the thread runs, or would if it got a processor.
bool ThreadActivity::ready() const {
  if (thread_ == 0) return true;
  char text[256];
  std::snprintf(text, sizeof text, "/proc/self/task/%lld/stat", static_cast<long long>(thread_));
  const int file = open(text, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return false;
  text[length] = '\0';
  const char* const name_end = std::strrchr(text, ')');
  return name_end != nullptr && name_end[1] == ' ' && name_end[2] == 'R';
}

}  // namespace pymoe::runtime
