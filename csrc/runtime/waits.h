// Waits: records which threads wait for which others, inside batches or with a turn, to prevent deadlocks.
//
//     waits.begin(pool, request, limited);   // throws std::logic_error if the wait could never end
//     ...
//     if (!waits.end()) waits.regain();
//
//     while (!waits.enter(turn, until)) ...  // a turn admits one thread, and those for which that thread waits
//     waits.leave(turn);
//
// Blocker    A waiting thread's blocker is the thread for which it waits: for a request, the thread that runs a batch
//            of the request's strand; for a turn, its holder. A thread that itself runs that batch has no blocker.
// Never      If the blockers of waits without a limit form a cycle, none of these waits can end: the last of them to
//            begin throws, with the names of the pools. Waits for a turn do not count for this, since they end.
// Turns      Turns are re-entrant. If a turn's holder waits, it lends the turn to the thread for which it waits,
//            directly or through others, as if that thread ran on the holder's own thread (on a single worker it does).
//            The last thread to enter leaves first; a holder whose wait ends earlier (end() then returns false) must
//            regain its turns.
// Locks      There is one lock; the locks of strands are taken while it is held.
#pragma once

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/task_pool.h"

namespace pymoe::runtime {

// A resource that one thread at a time may use, together with the threads for which it waits. The address of the Turn
// identifies the resource.
struct Turn {
  char unused = 0;
};

template <typename Sync>
class Waits {
 public:
  using Time = typename Sync::Time;
  using ThreadId = typename Sync::ThreadId;

  // Returns true if other threads may be waiting for this thread, because it runs a batch or has a turn.
  bool concern_this_thread() const {
    if (Sync::batches_on_this_thread() > 0) return true;
    const std::lock_guard lock(mutex_);
    const ThreadId me = Sync::this_thread();
    return std::any_of(held_.begin(), held_.end(), [&](const Held& one) { return one.thread == me; });
  }

  // Begins a wait of this thread for a request of the pool (null: for room in its queue). `limited`: the wait has a
  // timeout.
  void begin(const TaskPool<Sync>& pool, const Request<Sync>* request, bool limited) {
    const std::lock_guard lock(mutex_);
    const ThreadId me = Sync::this_thread();
    waits_.push_back({me, &pool, request, nullptr, limited});
    std::string names;
    ThreadId thread = me;
    for (size_t step = 0; step <= waits_.size(); ++step) {
      const std::optional<ThreadId> next = blocker(thread, true);
      if (!next) break;
      names += (step == 0 ? "'" : ", which waits for '") + wait_of(thread)->pool->name() + "'";
      if (*next == me) {
        waits_.pop_back();
        throw std::logic_error("TaskPool: a batch waits for " + names +
                               ", which waits for this batch: none of them could ever go on");
      }
      thread = *next;
    }
    if (wanting_ > 0) changed_.notify_all();
  }

  // Ends this thread's latest wait. Returns false if the thread has lent a turn that is not back yet; then call
  // regain().
  bool end() {
    const std::lock_guard lock(mutex_);
    forget_wait(Sync::this_thread());
    return has_its_turns(Sync::this_thread());
  }

  void regain() {
    std::unique_lock lock(mutex_);
    const ThreadId me = Sync::this_thread();
    ++wanting_;
    while (!has_its_turns(me)) changed_.wait(lock);
    --wanting_;
  }

  // Waits for the turn. Returns true once this thread has it, false if it does not have it by `until`.
  bool enter(const Turn& turn, Time until) {
    std::unique_lock lock(mutex_);
    const ThreadId me = Sync::this_thread();
    if (!is_free_for(turn, me)) {
      waits_.push_back({me, nullptr, nullptr, &turn, false});
      if (wanting_++ > 0) changed_.notify_all();  // waits for this thread become waits for the turn's holder
      while (!is_free_for(turn, me) && Sync::now() < until) changed_.wait_until(lock, until);
      --wanting_;
      forget_wait(me);
      if (!is_free_for(turn, me)) return false;
    }
    held_.push_back({me, &turn});
    return true;
  }

  // Undoes this thread's latest enter(turn). Does nothing if there is none, as in a forked child.
  void leave(const Turn& turn) {
    const std::lock_guard lock(mutex_);
    const ThreadId me = Sync::this_thread();
    for (size_t i = held_.size(); i-- > 0;) {
      if (held_[i].turn != &turn || !(held_[i].thread == me)) continue;
      held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    if (wanting_ > 0) changed_.notify_all();
  }

 private:
  struct Wait {
    ThreadId thread;
    const TaskPool<Sync>* pool;  // null: for the turn
    const Request<Sync>* request;
    const Turn* turn;
    bool limited;
  };
  struct Held {
    ThreadId thread;
    const Turn* turn;
  };

  // --- with the lock held ---

  // Returns the latest wait of a thread, or null. The thread may have several, because it may run batches while it
  // waits, and these may wait in turn.
  const Wait* wait_of(ThreadId thread) const {
    for (size_t i = waits_.size(); i-- > 0;) {
      if (waits_[i].thread == thread) return &waits_[i];
    }
    return nullptr;
  }

  void forget_wait(ThreadId thread) { waits_.erase(waits_.begin() + (wait_of(thread) - waits_.data())); }

  std::optional<ThreadId> holder_of(const Turn* turn) const {
    for (size_t i = held_.size(); i-- > 0;) {
      if (held_[i].turn == turn) return held_[i].thread;
    }
    return std::nullopt;
  }

  // Returns the thread for which `thread` waits, if `thread` cannot continue by itself. `for_ever`: count only waits
  // that may never end, that is, neither waits with a timeout nor waits for turns.
  std::optional<ThreadId> blocker(ThreadId thread, bool for_ever) const {
    const Wait* wait = wait_of(thread);
    if (wait == nullptr) return std::nullopt;
    if (wait->turn != nullptr) return for_ever ? std::nullopt : holder_of(wait->turn);
    if ((for_ever && wait->limited) || (wait->request != nullptr && wait->request->done())) return std::nullopt;
    const std::optional<ThreadId> runner = wait->pool->strand()->runner();
    return runner && *runner == thread ? std::nullopt : runner;
  }

  bool waits_for(ThreadId thread, ThreadId target) const {
    for (size_t step = 0; step <= waits_.size(); ++step) {
      const std::optional<ThreadId> next = blocker(thread, false);
      if (!next) return false;
      if (*next == target) return true;
      thread = *next;
    }
    return false;
  }

  bool is_free_for(const Turn& turn, ThreadId thread) const {
    const std::optional<ThreadId> holder = holder_of(&turn);
    return !holder || *holder == thread || waits_for(*holder, thread);
  }

  bool has_its_turns(ThreadId thread) const {
    return std::all_of(held_.begin(), held_.end(),
                       [&](const Held& one) { return !(one.thread == thread) || *holder_of(one.turn) == thread; });
  }

  mutable typename Sync::Mutex mutex_;
  std::vector<Wait> waits_;           // the waits, in the order in which they began
  std::vector<Held> held_;            // the turns, in the order in which they were entered
  int wanting_ = 0;                   // number of threads that wait for turns
  typename Sync::Condition changed_;  // signalled when a thread that waits for a turn may have it now
};

}  // namespace pymoe::runtime
