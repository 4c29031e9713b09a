// The runtime's interface to the machine (locks, waits, time and threads), as one template parameter.
//
// Every class of the runtime takes a `Sync`, so that one source serves the product and its tests: SystemSync uses the
// operating system; the tests use fibers, a seeded scheduler and a clock that advances when no fiber can run
// (tests/cpp/simulated.h). A Sync offers
//
//     Mutex                        lock(), unlock(): what std::lock_guard and std::unique_lock need
//     Condition                    wait(lock), wait_until(lock, Time), notify_one(), notify_all(); wakes may be
//                                  spurious, so every wait is in a loop over its condition
//     Time, Duration               a steady clock's points and spans; now()
//     Thread                       constructed with a function; join(), joinable()
//     this_thread()                an ID to compare
//     Activity of_this_thread(), and from other threads advanced() and ready(): whether a thread is active (activity.h)
//     batches_on_this_thread()     int&: number of nested batches on the calling thread (strand.h counts)
//     preempt()                    a place where a schedule may switch: before an atomic that decides something
//
// Rules of the runtime: no lock is held while a task, a callback or a batch runs, and at most one lock at a time unless
// a header states an order.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/activity.h"

namespace pymoe::runtime {

struct SystemSync {
  using Mutex = std::mutex;
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  using Duration = Clock::duration;
  using Thread = std::thread;
  using ThreadId = std::thread::id;
  using Activity = ThreadActivity;

  class Condition {
   public:
    // What std::condition_variable::wait does. gcc 12 binds that to a version of libstdc++ that systems with glibc 2.34
    // lack, such as RHEL 9.
    void wait(std::unique_lock<Mutex>& lock) {
      pthread_cond_wait(condition_.native_handle(), lock.mutex()->native_handle());
    }
    // Returns false if `until` has passed.
    bool wait_until(std::unique_lock<Mutex>& lock, Time until) {
      return condition_.wait_until(lock, until) == std::cv_status::no_timeout;
    }
    void notify_one() { condition_.notify_one(); }
    void notify_all() { condition_.notify_all(); }

   private:
    std::condition_variable condition_;
  };

  static Time now() { return Clock::now(); }
  // If a thread works for another one that waits for it, it adopts the other's ID, so that both share their waits and
  // turns.
  static ThreadId this_thread() { return own_id(); }
  static void adopt(ThreadId id) { own_id() = id; }
  static int& batches_on_this_thread() {
    static thread_local int count = 0;
    return count;
  }
  static void preempt() {}

 private:
  static ThreadId& own_id() {
    static thread_local ThreadId id = std::this_thread::get_id();
    return id;
  }
};

}  // namespace pymoe::runtime
