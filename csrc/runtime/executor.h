// Executor: workers that run the strands attached to them, and a thread that handles deadlines.
//
//     Executor<SystemSync> executor(2);
//     executor.attach(strand);
//     ...
//     executor.request_stop(Stop::kDrain);
//     while (!executor.wait_stopped_until(...)) ...
//
// Stopping   request_stop closes the pools of every strand and returns immediately. With kDrain, their requests still
//            run; with kCancel, requests that have not begun are cancelled. wait_stopped_until returns true once every
//            submitted request is done and every thread has ended. Both may be called repeatedly. The destructor stops
//            with kCancel.
// Release    wait_released_until detaches a strand once its requests are done, so that an expert can leave while others
//            continue. Call the strand's request_stop before. reopen reverses that request_stop, if no thread waits
//            for the strand's end.
// Errors     attach and reopen throw StoppedError after a stop; attach throws std::logic_error if the strand is already
//            attached to an executor. wait_stopped_until throws std::logic_error on a worker, or inside a batch of one
//            of the strands.
// Threads    All functions may be called from any thread.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/strand.h"
#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template <typename Sync>
class Executor {
 public:
  using Time = typename Sync::Time;
  using StrandPointer = std::shared_ptr<Strand<Sync>>;
  using Around = typename WorkerPool<Sync>::Around;

  explicit Executor(int workers, Around around = {})
      : workers_(std::make_shared<WorkerPool<Sync>>(workers, around)),
        timer_(std::make_shared<WorkerPool<Sync>>(1, around)) {}

  ~Executor() {
    request_stop(Stop::kCancel);
    while (!wait_stopped_until(Time::max())) {
    }
  }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void attach(const StrandPointer& strand) { attach(std::vector{strand}); }
  void attach(const std::vector<StrandPointer>& strands) {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw StoppedError("Executor: attach after it was stopped");
    for (const StrandPointer& strand : strands) {
      strand->attach(workers_, timer_);
      strands_.push_back(strand);
    }
  }

  bool wait_released_until(const StrandPointer& strand, Time until) {
    if (!strand->wait_finished_until(until)) return false;
    const std::lock_guard lock(mutex_);
    if (std::erase(strands_, strand) > 0) strand->detach();
    return true;
  }

  // Reverses the strand's request_stop, and attaches the strand again if it was already detached. No thread may be
  // waiting for the strand's end.
  void reopen(const StrandPointer& strand) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) throw StoppedError("Executor: reopen after it was stopped");
      if (std::find(strands_.begin(), strands_.end(), strand) != strands_.end()) {
        strand->reopen();
        return;
      }
    }
    attach(strand);
  }

  void request_stop(Stop how) { Strand<Sync>::request_stop(stop_attaching(), how); }

  bool wait_stopped_until(Time until) {
    for (const StrandPointer& strand : stop_attaching()) {
      if (!wait_released_until(strand, until)) return false;
    }
    workers_->request_stop(Stop::kDrain);
    timer_->request_stop(Stop::kCancel);
    return workers_->wait_stopped_until(until) && timer_->wait_stopped_until(until);
  }

  bool on_worker() const { return workers_->on_worker() || timer_->on_worker(); }

 private:
  std::vector<StrandPointer> stop_attaching() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    return strands_;
  }

  const std::shared_ptr<WorkerPool<Sync>> workers_, timer_;
  // Guards the members below. Lock order: this lock, then a strand's, then the workers'.
  typename Sync::Mutex mutex_;
  std::vector<StrandPointer> strands_;
  bool stopping_ = false;
};

}  // namespace pymoe::runtime
