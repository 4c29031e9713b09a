// Growth: when a pool of workers gets more threads.
//
// Jobs are left lying when every worker has one. If those compute, another thread would only take the processor, and
// the interpreter's lock, from them. If they wait (for a machine, a timer, each other) it costs nothing, and without it
// those that wait for each other wait for ever. Which of the two it is decides what a thread does, not what a job says:
//
//   - A worker waits when it has done nothing for a span (`still`): no processor time at all, and not ready to run
//     (activity.h). A span longer than the interpreter's switch interval tells threads that wait for its lock apart:
//     they look after it once in such an interval. Threads that look for something again and again (polling) compute.
//   - The pool is to have `workers` threads that do something, as many as it was made with. If some do, those that are
//     missing are added. If none does, their number is doubled: n jobs that wait for each other take log(n) spans.
//
// So jobs that compute get no more threads than that. Those that waited and now compute do so on the threads that they
// had; if more than `workers` do something for a while (ten spans), those beyond end as soon as they have no job.
#pragma once

#include <algorithm>

namespace pymoe::runtime {

template <typename Sync>
struct Growth {
  int most = 0;                     // threads; a pool with no fewer workers does not grow
  typename Sync::Duration still{};  // who does nothing for so long waits
  typename Sync::Duration idle{};   // threads that were added end after so long without a job
};

// What is known of a thread that may wait.
template <typename Sync>
struct Watched {
  typename Sync::Activity activity;
  typename Sync::Time since{};  // when it was last seen doing something

  // `closely`: one that only lacks a processor does something, too.
  bool does_something(typename Sync::Time now, typename Sync::Duration still, bool closely) {
    if (activity.advanced() || (closely && now - since >= still && activity.ready())) since = now;
    return now - since < still;
  }
};

// How many threads to add to `workers`, of which `active` do something.
inline int missing_workers(int wanted, int workers, int active) {
  return active > 0 ? std::max(wanted - active, 0) : std::max(wanted, workers);
}

}  // namespace pymoe::runtime
