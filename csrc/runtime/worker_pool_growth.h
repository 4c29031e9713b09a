// Growth: the rule by which a WorkerPool gets more threads, and the watcher, the thread that starts and joins them.
// Part of worker_pool.h, which includes this file.
//
// Jobs stay queued if every worker has one. If the running jobs compute, another thread would only take the processor,
// and the interpreter's lock, from them. If they wait (for a machine, a timer, each other), another thread costs
// nothing, and without it jobs that wait for each other would wait for ever. Jobs do not declare which of the two they
// do: the activity of their threads shows it.
//
//   - A worker counts as waiting if it was inactive for a span (`still`): no processor time at all, and not ready to
//     run (activity.h). The span should be longer than the interpreter's switch interval: threads that wait for its
//     lock then do not count as waiting, because they wake once per interval. Threads that poll count as computing.
//   - The pool should have `workers` active threads, as many as at its creation. If some are active, the missing ones
//     are added. If none is, the number of threads is doubled: n jobs that wait for each other take log(n) spans.
//
// So jobs that compute get no more than `workers` threads. Jobs that waited and now compute stay on their threads; if
// more than `workers` are active for a while (ten spans), surplus threads end instead of taking another job. Threads
// beyond the first `workers` also end after a long time without a job (`idle`). The watcher sleeps unless a job stays
// queued, or more than `workers` threads have one.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template <typename Sync>
void WorkerPool<Sync>::watch() {
  Lock lock(mutex_);
  Time due{};  // time of the next look if no job stays queued
  while (!stopping_ || !ready_.empty()) {
    if (!retired_.empty()) {
      join_retired(lock);
      continue;  // the pool may have been stopped meanwhile
    }
    const Time now = Sync::now();
    Time until = Time::max();
    if (unserved(now) > 0) {
      until = look(lock, now);
    } else if (workers() > base_ + static_cast<int>(idle_.size())) {
      if (!(now < due)) due = look(lock, now);
      until = std::min(due, now + growth_.still / 4);
    } else {
      surplus_ = 0;
      crowded_since_ = Time::max();
      if (!timed_.empty() && idle_.empty() && timekeeper_ == nullptr) until = timed_.begin()->first;
      watched_ = false;
    }
    if (until == Time::max()) {
      while (!watched_) watch_.wait(lock);
    } else {
      watch_.wait_until(lock, until);
    }
    watched_ = true;
  }
  lock.unlock();
  count_ended();
}

template <typename Sync>
auto WorkerPool<Sync>::look(Lock& lock, Time now) -> Time {
  const auto room = static_cast<size_t>(std::max(growth_.most - workers(), 0));
  const size_t wanted = std::min(unserved(now), room);
  int active = 0;
  for (const auto& worker : workers_) {
    // ready() is slower than advanced(), so it is called only when needed. It recognises active threads that lack a
    // processor.
    const bool closely = wanted > 0 && now - worker->since >= growth_.still;
    if (worker->activity.advanced() || (closely && worker->activity.ready())) worker->since = now;
    active += now - worker->since < growth_.still;
  }
  active = std::min(active, workers() - static_cast<int>(idle_.size()));
  const typename Sync::Duration took = Sync::now() - now;  // considerable if many threads wait
  if (active <= base_) crowded_since_ = Time::max();
  crowded_since_ = std::min(crowded_since_, now);
  surplus_ = now - crowded_since_ < growth_.still * 10 ? 0 : active - base_;
  const int missing = active > 0 ? std::max(base_ - active, 0) : std::max(base_, workers());
  int count = std::min(missing, static_cast<int>(wanted));
  lock.unlock();
  bool refused = false;
  for (; count > 0 && !refused; --count) {
    try {
      start_worker();
    } catch (...) {
      refused = true;  // the system starts no more threads
    }
  }
  lock.lock();
  if (wanted == 0) return now + growth_.still * 2;
  return now + (refused ? growth_.still * 16 : std::max(growth_.still / 4, took * 4));
}

template <typename Sync>
void WorkerPool<Sync>::join_retired(Lock& lock) {
  while (!retired_.empty()) {
    std::unique_ptr<Worker> worker = std::move(retired_.back());
    retired_.pop_back();
    lock.unlock();
    worker->thread.join();
    lock.lock();
    spare_.push_back(std::move(worker));
  }
}

}  // namespace pymoe::runtime
