// The watcher of a worker pool that may grow: the thread that starts and joins workers (worker_pool.h, which includes
// this; growth.h says when).
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template <typename Sync>
void WorkerPool<Sync>::watch() {
  Lock lock(mutex_);
  Time due{};  // when to look again if nothing is left lying
  while (!stopping_ || !ready_.empty()) {
    if (!retired_.empty()) {
      join_retired(lock);
      continue;  // the pool may have been stopped meanwhile
    }
    const Time now = Sync::now();
    Time until = Time::max();
    if (left_lying(now) > 0) {
      until = look(lock, now);
    } else if (workers() > base_ + static_cast<int>(idle_.size())) {
      if (!(now < due)) due = look(lock, now);
      until = std::min(due, now + growth_.still / 4);
    } else {
      surplus_ = 0;
      crowded_since_ = Time::max();
      if (!timed_.empty() && idle_.empty() && timekeeper_ == nullptr) until = timed_.first_rank();
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
  const size_t wanted = std::min(left_lying(now), room);
  int active = 0;
  for (const auto& worker : workers_) active += worker->does_something(now, growth_.still, wanted > 0);
  active = std::min(active, workers() - static_cast<int>(idle_.size()));
  const typename Sync::Duration took = Sync::now() - now;  // a while where many wait
  if (active <= base_) crowded_since_ = Time::max();
  crowded_since_ = std::min(crowded_since_, now);
  surplus_ = now - crowded_since_ < growth_.still * 10 ? 0 : active - base_;
  int count = std::min(missing_workers(base_, workers(), active), static_cast<int>(wanted));
  lock.unlock();
  bool refused = false;
  for (; count > 0 && !refused; --count) {
    try {
      start_worker();
    } catch (...) {
      refused = true;  // by the system
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
