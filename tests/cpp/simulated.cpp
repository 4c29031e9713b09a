// SimulatedSync on the scheduler; compiled without sanitizers.
#include "simulated.h"

#include <algorithm>
#include <memory>
#include <system_error>
#include <utility>

#include "scheduler.h"

namespace pymoe::simulation {
namespace {

using emulator::Unwatched;

constexpr int kDestroyed = -1;

// Returns the number by which reports name a mutex or condition.
int number_of(Simulation& s, int& number, const char* name) {
  if (number == kDestroyed) end_failed(s, std::string("a ") + name + " is used after its end");
  if (number == 0) number = ++s.next_number;
  return number;
}

void acquire(Simulation& s, const SimulatedSync::Mutex* mutex, int number, SimulatedSync::ThreadId& owner) {
  if (owner == s.current) end_failed(s, "a thread locks mutex " + std::to_string(number) + ", which it holds");
  while (owner != 0) block(s, Kind::kLock, mutex, number, kNever);
  owner = s.current;
  ++thread_of(s, s.current).locks;
  emulator::happens_after(&owner);
}

void release(Simulation& s, const SimulatedSync::Mutex* mutex, int number, SimulatedSync::ThreadId& owner) {
  if (owner != s.current)
    end_failed(s, "a thread unlocks mutex " + std::to_string(number) + ", which it does not hold");
  emulator::happens_before(&owner);
  --thread_of(s, s.current).locks;
  owner = 0;
  wake_all(s, mutex);
}

}  // namespace

void fail(const std::string& what) { end_failed(here(), what); }

void note(uint64_t value) { add_to_hash(here(), value); }

uint64_t random_below(uint64_t bound) { return draw_below(here(), bound); }

int locks_held() { return thread_of(here(), here().current).locks; }

void name_thread(const std::string& name) {
  const Unwatched unwatched;
  thread_of(here(), here().current).name = name;
}

// --- SimulatedSync ---

void SimulatedSync::Mutex::lock() {
  Simulation& s = here();
  const int number = number_of(s, number_, "mutex");
  switch_point(s, Kind::kLock, number);
  acquire(s, this, number, owner_);
}

void SimulatedSync::Mutex::unlock() {
  Simulation& s = here();
  const int number = number_of(s, number_, "mutex");
  release(s, this, number, owner_);
  switch_point(s, Kind::kUnlock, number);
}

void SimulatedSync::Condition::wait(std::unique_lock<Mutex>& lock) { wait_until(lock, Time(Duration(kNever))); }

bool SimulatedSync::Condition::wait_until(std::unique_lock<Mutex>& lock, Time until) {
  Simulation& s = here();
  Mutex& mutex = *lock.mutex();
  const int number = number_of(s, number_, "condition");
  switch_point(s, Kind::kWait, number);  // the thread does not wait yet
  release(s, &mutex, mutex.number_, mutex.owner_);
  const int64_t wake_at = until.time_since_epoch().count();
  if (wake_at <= s.now || (s.spurious != 0 && draw_below(s, s.spurious) == 0)) {
    make_ready(s, s.current);
    give_way(s);
  } else {
    block(s, Kind::kWait, this, number, wake_at);
  }
  number_of(s, mutex.number_, "mutex");
  acquire(s, &mutex, mutex.number_, mutex.owner_);
  return s.now < wake_at;
}

void SimulatedSync::Condition::notify_one() {
  Simulation& s = here();
  switch_point(s, Kind::kNotify, number_of(s, number_, "condition"));
  int waiting = 0, woken = 0;
  for (int id = 1; id <= s.count; ++id) {
    if (thread_of(s, id).state != State::kBlocked || thread_of(s, id).on != this) continue;
    if (draw_below(s, static_cast<uint64_t>(++waiting)) == 0) woken = id;
  }
  if (woken != 0) make_ready(s, woken);
}

void SimulatedSync::Condition::notify_all() {
  Simulation& s = here();
  switch_point(s, Kind::kNotify, number_of(s, number_, "condition"));
  wake_all(s, this);
}

SimulatedSync::ThreadId SimulatedSync::Thread::start(std::function<void()>* function) {
  Simulation& s = here();
  if (s.count == kMostThreads) end_failed(s, "too many threads");
  if (s.count == s.options.refused_thread) {  // numbers include the body, which is the first thread
    delete function;
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again), "a thread is refused");
  }
  emulator::happens_before(function);
  const ThreadId id = add_thread(s, function);
  switch_point(s, Kind::kStart, id);
  return id;
}

void SimulatedSync::Thread::join() {
  Simulation& s = here();
  const int id = std::exchange(id_, 0);
  if (id == 0) end_failed(s, "a thread is joined that is not joinable");
  record(s, Kind::kJoin, id);
  SimulatedThread& thread = thread_of(s, id);
  while (thread.state != State::kEnded) block(s, Kind::kJoin, &thread, id, kNever);
  emulator::happens_after(&thread);
}

SimulatedSync::Activity SimulatedSync::Activity::of_this_thread() {
  Activity activity;
  activity.thread_ = here().current;
  return activity;
}

bool SimulatedSync::Activity::advanced() {
  if (thread_ == 0) return true;
  const int64_t steps = thread_of(here(), thread_).steps;
  return std::exchange(seen_, steps) != steps;
}

bool SimulatedSync::Activity::ready() const {
  return thread_ == 0 || thread_of(here(), thread_).state == State::kReady;
}

SimulatedSync::Time SimulatedSync::now() { return Time(Duration(here().now)); }

SimulatedSync::ThreadId SimulatedSync::this_thread() { return here().current; }

int& SimulatedSync::batches_on_this_thread() { return thread_of(here(), here().current).batches; }

void SimulatedSync::preempt() { switch_point(here(), Kind::kPreempt, 0); }

void SimulatedSync::sleep_for(Duration duration) {
  Simulation& s = here();
  record(s, Kind::kSleep, 0);
  block(s, Kind::kSleep, nullptr, 0, s.now + std::max<int64_t>(duration.count(), 0));
}

void SimulatedSync::end(int& number, const void* object, bool locked) {
  if (simulation_or_none() == nullptr || here().failed) return;
  Simulation& s = here();
  if (locked) end_failed(s, "a mutex is destroyed while it is locked");
  for (int id = 1; id <= s.count; ++id) {
    if (thread_of(s, id).state == State::kBlocked && thread_of(s, id).on == object) {
      end_failed(s, "a mutex or condition is destroyed while " + title(s, id) + " waits for it");
    }
  }
  number = kDestroyed;
}

}  // namespace pymoe::simulation
