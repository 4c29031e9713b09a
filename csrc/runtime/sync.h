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
//     preempt()                    lets the tests' scheduler switch fibers; called before an atomic operation
//                                  that decides something
//
// Rules of the runtime: no lock is held while a task, a callback or a batch runs, and at most one lock at a time unless
// a header states an order.
#pragma once

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <ctime>
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

  // Not std::condition_variable: compiled with gcc 12, its wait() requires a newer libstdc++ than systems with
  // glibc 2.34 have, and its wait_until() requires a function that glibc has only since 2.30.
  class Condition {
   public:
    Condition() {
      pthread_condattr_t attributes;
      pthread_condattr_init(&attributes);
      pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);  // the clock of steady_clock
      pthread_cond_init(&condition_, &attributes);
      pthread_condattr_destroy(&attributes);
    }
    ~Condition() { pthread_cond_destroy(&condition_); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;

    void wait(std::unique_lock<Mutex>& lock) { pthread_cond_wait(&condition_, lock.mutex()->native_handle()); }
    // Waits for a notification, or until `until`. Returns false if `until` has passed.
    bool wait_until(std::unique_lock<Mutex>& lock, Time until) {
      const auto seconds = std::chrono::floor<std::chrono::seconds>(until);
      const timespec at{seconds.time_since_epoch().count(), std::chrono::nanoseconds(until - seconds).count()};
      return pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &at) != ETIMEDOUT;
    }
    void notify_one() { pthread_cond_signal(&condition_); }
    void notify_all() { pthread_cond_broadcast(&condition_); }

   private:
    pthread_cond_t condition_;
  };

  static Time now() { return Clock::now(); }
  // A thread that works for a waiting thread adopts that thread's ID, so that the waits and turns of both count as one
  // thread's (waits.h).
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
