// What the simulation knows, and who goes on: the inside of simulated.h, for its own sources alone.
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
constexpr int64_t kStart = 3'600'000'000'000;  // nanoseconds: what the clock shows at first
constexpr size_t kRecent = 40;

enum class Kind { kStart, kLock, kUnlock, kWait, kNotify, kJoin, kSleep, kPreempt, kEnd };

enum class State { kReady, kBlocked, kEnded };

// How a seed prefers to switch.
enum class Style { kOften, kSeldom, kRarely, kStarve };

struct SimulatedThread {
  emulator::Fiber* fiber = nullptr;
  std::function<void()>* body = nullptr;
  State state = State::kReady;
  bool entered = false;
  int locks = 0;    // that it holds
  int batches = 0;  // that it is inside of
  int64_t steps = 0;
  Kind blocked_by = Kind::kStart;
  const void* on = nullptr;  // the mutex, condition or thread that it is blocked by
  int on_number = 0;
  int64_t wake_at = kNever;
  uint64_t weight = 0;                   // kStarve: the greatest goes on
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
  uint64_t spurious = 0;  // one wait of so many wakes for nothing; 0: none
  std::array<SimulatedThread, kMostThreads> threads;
  int count = 0, ended = 0, current = 0, chosen = 0;  // threads count from 1
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

// The simulation that the calling thread is in.
Simulation& here();
Simulation* simulation_or_none();

inline SimulatedThread& thread_of(Simulation& s, int id) { return s.threads[static_cast<size_t>(id - 1)]; }
std::string title(Simulation& s, int id);

// A number below `bound` that the seed decides.
uint64_t draw_below(Simulation& s, uint64_t bound);
void add_to_hash(Simulation& s, uint64_t value);

int add_thread(Simulation& s, std::function<void()>* body);

// The rest is called on the current thread.

void record(Simulation& s, Kind kind, int number);
// A place where the schedule may switch, with the current thread able to go on.
void switch_point(Simulation& s, Kind kind, int number);
// Until somebody wakes `on`, or the clock shows `wake_at`.
void block(Simulation& s, Kind kind, const void* on, int number, int64_t wake_at);
// Lets others run, and goes on at some time.
void give_way(Simulation& s);
void make_ready(Simulation& s, int id);
void wake_all(Simulation& s, const void* on);
// Ends the schedule as failed.
[[noreturn]] void end_failed(Simulation& s, const std::string& text);

}  // namespace pymoe::simulation
