// SimulatedSync: simulated locks, waits, time and threads of the runtime; a seed determines the whole schedule.
//
//     const Outcome outcome = simulate({.seed = 42}, [] {
//       WorkerPool<SimulatedSync> pool(2);
//       ...
//     });
//     REQUIRE_MESSAGE(outcome.ok(), outcome.failure);
//
// Schedules  Threads are fibers of the calling thread. At every lock, unlock, wait, notification, start of a thread and
//            preempt() the seed chooses the thread that continues. Seeds differ in style, too: some switch at every
//            such place, some seldom, some starve a thread for a while. In every other seed, waits sometimes wake
//            without a reason. Equal seeds give equal schedules, and equal hashes as long as the code under test is
//            the same.
// Time       The clock is virtual. When no thread can run, it advances to the next time that a thread waits for: code
//            takes no time, sleep_for does. With Options::stalls threads also lose time, where the seed chooses.
// Failures   The simulation ends a schedule, and reports where every thread stands, at a deadlock, a schedule that does
//            not end, a mutex or condition that is misused or used after its end, an exception that leaves a thread,
//            and a call of fail(). A schedule that fails leaves its fibers where they are.
// Sanitizers The simulation's own code is compiled without sanitizers. It tells ThreadSanitizer about fibers, and about
//            the order that locks and threads establish. Nothing else orders what two fibers do, so a race is reported
//            if a single schedule shows it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

namespace pymoe::simulation {

struct Options {
  uint64_t seed = 0;
  // Threads may stall for up to 4 ms at any switch.
  bool stalls = false;
  // A schedule with more steps counts as one that does not end.
  int64_t most_steps = 200'000;
  // The number of the thread whose start is refused, as by a system without free threads; 0: no start is refused.
  int refused_thread = 0;
  // Prints every step as it happens; a report holds only the last steps.
  bool trace = false;
};

struct Outcome {
  std::string failure;  // empty if the schedule did not fail
  uint64_t hash = 0;    // of the order in which threads ran, and of the numbers given to note()
  int64_t steps = 0;
  int64_t nanoseconds = 0;  // of virtual time

  bool ok() const { return failure.empty(); }
};

// Runs `body` and all threads that it starts until they end. Must not be called within a simulation.
Outcome simulate(const Options& options, const std::function<void()>& body);

// The functions below are for code within a simulation.

// Ends the schedule as failed; does not return.
[[noreturn]] void fail(const std::string& what);
// Fails unless `fine`.
inline void expect(bool fine, const char* what) {
  if (!fine) fail(what);
}
// Puts a number into the hash.
void note(uint64_t value);
// Returns a number in 0 .. bound - 1, determined by the seed.
uint64_t random_below(uint64_t bound);
// Returns how many mutexes the calling thread holds.
int locks_held();
// Sets the name of the calling thread in reports.
void name_thread(const std::string& name);

struct SimulatedSync {
  struct Clock {
    using duration = std::chrono::nanoseconds;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<Clock, duration>;
    static constexpr bool is_steady = true;
    static time_point now() { return SimulatedSync::now(); }
  };
  using Time = Clock::time_point;
  using Duration = Clock::duration;
  using ThreadId = int;  // from 1 on; 0 is no thread

  class Condition;

  class Mutex {
   public:
    Mutex() = default;
    ~Mutex() { end(number_, this, owner_ != 0); }
    Mutex(const Mutex&) = delete;
    Mutex& operator=(const Mutex&) = delete;
    void lock();
    void unlock();
    ThreadId owner() const { return owner_; }

   private:
    friend class Condition;
    int number_ = 0;  // in reports; numbers are given in the order of first use
    ThreadId owner_ = 0;
  };

  class Condition {
   public:
    Condition() = default;
    ~Condition() { end(number_, this, false); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;
    void wait(std::unique_lock<Mutex>& lock);
    // Returns false if `until` has passed.
    bool wait_until(std::unique_lock<Mutex>& lock, Time until);
    void notify_one();
    void notify_all();

   private:
    int number_ = 0;
  };

  class Thread {
   public:
    Thread() = default;
    template <typename Function>
    explicit Thread(Function function) : id_(start(new std::function<void()>(std::move(function)))) {}
    Thread(Thread&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
    Thread& operator=(Thread&& other) noexcept {
      id_ = std::exchange(other.id_, 0);
      return *this;
    }
    bool joinable() const { return id_ != 0; }
    void join();

   private:
    static ThreadId start(std::function<void()>* function);
    ThreadId id_ = 0;
  };

  // A thread is active if it takes steps. Repeated sleeps are steps too: a scenario uses them to simulate computing.
  class Activity {
   public:
    static Activity of_this_thread();
    bool advanced();
    bool ready() const;

   private:
    ThreadId thread_ = 0;
    int64_t seen_ = -1;
  };

  static Time now();
  static ThreadId this_thread();
  static int& batches_on_this_thread();
  static void preempt();
  static void sleep_for(Duration duration);

 private:
  // Called when a mutex or condition is destroyed.
  static void end(int& number, const void* object, bool locked);
};

}  // namespace pymoe::simulation
