// The state of a simulation and the choice of the next thread: internals of simulated.h, for its own sources only.
//
// Compiled without sanitizers. Only one thread of a simulation runs at a time, so nothing here is locked.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "cuda_on_cpu/fiber.h"
#include "simulated.h"

namespace pymoe::simulation {

constexpr int kMostThreads = 64;
constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kStart = 3'600'000'000'000;  // nanoseconds: the initial time of the clock
constexpr size_t kRecent = 40;

enum class Kind { kStart, kLock, kUnlock, kWait, kNotify, kJoin, kSleep, kPreempt, kEnd };

enum class State { kReady, kBlocked, kEnded };

// The style of a seed: how often it prefers to switch, and to which threads.
enum class Style { kOften, kSeldom, kRarely, kStarve };

struct SimulatedThread {
  emulator::Fiber* fiber = nullptr;
  std::function<void()>* body = nullptr;
  State state = State::kReady;
  bool entered = false;
  int locks = 0;    // mutexes that the thread holds
  int batches = 0;  // batches that the thread is running
  int64_t steps = 0;
  Kind blocked_by = Kind::kStart;
  const void* on = nullptr;  // the mutex, condition or thread that blocks it
  int on_number = 0;
  int64_t wake_at = kNever;
  uint64_t weight = 0;                   // in style kStarve the thread with the greatest weight continues
  std::array<uint64_t, 2> exceptions{};  // what __cxa_get_globals points to while it runs
  std::string name;
};

struct Step {
  int thread = 0, number = 0;
  Kind kind = Kind::kStart;
  int64_t now = 0;
};

struct Simulation {
  Options options;
  uint64_t random = 0;
  Style style = Style::kOften;
  uint64_t spurious = 0;  // one of this many waits wakes without a reason; 0: none does
  std::array<SimulatedThread, kMostThreads> threads;
  int count = 0, ended = 0, current = 0, chosen = 0;  // numbers of threads, which begin at 1
  std::array<int, kMostThreads> ready{};
  int ready_count = 0;
  int next_number = 0;
  int64_t now = kStart;
  int64_t steps = 0, next_weights = 0;
  uint64_t hash = 14695981039346656037u;
  std::array<Step, kRecent> recent{};
  std::string failure;
  bool failed = false;
};

// Returns the simulation in which the calling thread runs.
Simulation& here();
Simulation* simulation_or_none();

inline SimulatedThread& thread_of(Simulation& s, int id) { return s.threads[static_cast<size_t>(id - 1)]; }
std::string title(Simulation& s, int id);

// Returns a number below `bound`, determined by the seed.
uint64_t draw_below(Simulation& s, uint64_t bound);
void add_to_hash(Simulation& s, uint64_t value);

int add_thread(Simulation& s, std::function<void()>* body);

// The functions below act on the thread that calls them.

void record(Simulation& s, Kind kind, int number);
// Lets the schedule switch to another thread, while the current one stays ready to run.
void switch_point(Simulation& s, Kind kind, int number);
// Blocks the current thread until a thread wakes `on`, or the clock reaches `wake_at`.
void block(Simulation& s, Kind kind, const void* on, int number, int64_t wake_at);
// Lets other threads run; returns when this one is chosen again.
void give_way(Simulation& s);
void make_ready(Simulation& s, int id);
void wake_all(Simulation& s, const void* on);
// Ends the schedule as failed.
[[noreturn]] void end_failed(Simulation& s, const std::string& text);

}  // namespace pymoe::simulation
