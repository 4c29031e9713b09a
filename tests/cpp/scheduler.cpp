// Chooses the thread that continues: see scheduler.h; compiled without sanitizers.
#include "scheduler.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

namespace pymoe::simulation {
namespace {

using emulator::Unwatched;

constexpr int64_t kLongestStall = 4'000'000;  // nanoseconds
constexpr const char* kKinds[] = {"starts", "locks",  "unlocks",      "waits for", "notifies",
                                  "joins",  "sleeps", "is preempted", "ends"};
constexpr const char* kStyles[] = {"switches often", "switches seldom", "switches rarely", "starves threads"};

thread_local Simulation* running = nullptr;
thread_local emulator::FiberPool fibers;

}  // namespace

static uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

static uint64_t draw(Simulation& s) { return mix(s.random += 0x9e3779b97f4a7c15u); }

uint64_t draw_below(Simulation& s, uint64_t bound) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(draw(s)) * bound) >> 64);
}

void add_to_hash(Simulation& s, uint64_t value) { s.hash = mix(s.hash ^ value) + value; }

void make_ready(Simulation& s, int id) {
  SimulatedThread& thread = thread_of(s, id);
  thread.state = State::kReady;
  thread.on = nullptr;
  thread.wake_at = kNever;
  s.ready[static_cast<size_t>(s.ready_count++)] = id;
}

// --- reports ---

static std::string milliseconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f ms", static_cast<double>(nanoseconds - kStart) * 1e-6);
  return text;
}

static std::string what(Kind kind, int number) {
  std::string text = kKinds[static_cast<size_t>(kind)];
  if (kind == Kind::kLock || kind == Kind::kUnlock) text += " mutex " + std::to_string(number);
  if (kind == Kind::kWait || kind == Kind::kNotify) text += " condition " + std::to_string(number);
  if (kind == Kind::kJoin || kind == Kind::kStart) text += " thread " + std::to_string(number);
  return text;
}

std::string title(Simulation& s, int id) {
  const std::string& name = thread_of(s, id).name;
  return "thread " + std::to_string(id) + (name.empty() ? "" : " (" + name + ")");
}

static void set_failure(Simulation& s, const std::string& text) {
  const Unwatched unwatched;
  if (s.failed) return;
  s.failed = true;
  std::string report = text + "\n  seed " + std::to_string(s.options.seed) + (s.options.stalls ? " with stalls" : "") +
                       ", which " + kStyles[static_cast<size_t>(s.style)] + ", step " + std::to_string(s.steps) +
                       ", at " + milliseconds(s.now) + "\n";
  for (int id = 1; id <= s.count; ++id) {
    const SimulatedThread& thread = thread_of(s, id);
    report += "  " + title(s, id) + ": ";
    if (id == s.current) {
      report += "runs";
    } else if (thread.state == State::kReady) {
      report += "could run";
    } else if (thread.state == State::kEnded) {
      report += "has ended";
    } else {
      report += what(thread.blocked_by, thread.on_number);
      if (thread.blocked_by == Kind::kLock) {
        report +=
            ", which thread " + std::to_string(static_cast<const SimulatedSync::Mutex*>(thread.on)->owner()) + " holds";
      }
      if (thread.wake_at != kNever) report += " until " + milliseconds(thread.wake_at);
    }
    report += "\n";
  }
  report += "  the last steps:\n";
  for (int64_t i = s.steps > static_cast<int64_t>(kRecent) ? s.steps - static_cast<int64_t>(kRecent) : 0; i < s.steps;
       ++i) {
    const Step& step = s.recent[static_cast<size_t>(i) % kRecent];
    report +=
        "    " + milliseconds(step.now) + "  " + title(s, step.thread) + " " + what(step.kind, step.number) + "\n";
  }
  s.failure = report;
}

void end_failed(Simulation& s, const std::string& text) {
  set_failure(s, text);
  emulator::happens_before(&s);
  emulator::leave_fiber(thread_of(s, s.current).fiber);
  std::abort();
}

Simulation* simulation_or_none() { return running != nullptr && running->current != 0 ? running : nullptr; }

Simulation& here() {
  if (simulation_or_none() == nullptr) {
    std::fprintf(stderr, "simulated: a lock, wait or thread outside of a simulation\n");
    std::abort();
  }
  return *running;
}

// --- the choice of the next thread ---

void record(Simulation& s, Kind kind, int number) {
  const int64_t step = s.steps++;
  ++thread_of(s, s.current).steps;
  s.recent[static_cast<size_t>(step) % kRecent] = {s.current, number, kind, s.now};
  add_to_hash(
      s, static_cast<uint64_t>(s.current) << 32 ^ static_cast<uint64_t>(number) << 8 ^ static_cast<uint64_t>(kind));
  if (s.options.trace) {
    const Unwatched unwatched;
    std::fprintf(stderr, "%9s  %s %s\n", milliseconds(s.now).c_str(), title(s, s.current).c_str(),
                 what(kind, number).c_str());
  }
  if (s.steps > s.options.most_steps) end_failed(s, "the schedule does not end");
}

// Returns the index in `ready` of the thread that continues.
static int choose(Simulation& s) {
  if (s.style != Style::kStarve) return static_cast<int>(draw_below(s, static_cast<uint64_t>(s.ready_count)));
  if (s.steps >= s.next_weights) {
    s.next_weights = s.steps + 1 + static_cast<int64_t>(draw_below(s, 100));
    for (int id = 1; id <= s.count; ++id) thread_of(s, id).weight = draw(s);
  }
  int best = 0;
  for (int i = 1; i < s.ready_count; ++i) {
    const auto weight = [&](int place) { return thread_of(s, s.ready[static_cast<size_t>(place)]).weight; };
    if (weight(i) > weight(best)) best = i;
  }
  return best;
}

void give_way(Simulation& s) { emulator::leave_fiber(thread_of(s, s.current).fiber); }

void switch_point(Simulation& s, Kind kind, int number) {
  record(s, kind, number);
  if (s.options.stalls && draw_below(s, 64) == 0) {
    SimulatedThread& thread = thread_of(s, s.current);
    thread.state = State::kBlocked;
    thread.blocked_by = Kind::kSleep;
    thread.wake_at = s.now + static_cast<int64_t>(draw_below(s, 5)) * (kLongestStall / 4);
    give_way(s);
    return;
  }
  if (s.ready_count == 0) return;
  if (s.style == Style::kSeldom && draw_below(s, 8) != 0) return;
  if (s.style == Style::kRarely && draw_below(s, 32) != 0) return;
  s.ready[static_cast<size_t>(s.ready_count++)] = s.current;
  const int place = choose(s);
  const int next = s.ready[static_cast<size_t>(place)];
  s.ready[static_cast<size_t>(place)] = s.ready[static_cast<size_t>(--s.ready_count)];
  if (next == s.current) return;
  s.chosen = next;
  give_way(s);
}

void block(Simulation& s, Kind kind, const void* on, int number, int64_t wake_at) {
  SimulatedThread& thread = thread_of(s, s.current);
  thread.state = State::kBlocked;
  thread.blocked_by = kind;
  thread.on = on;
  thread.on_number = number;
  thread.wake_at = wake_at;
  give_way(s);
}

void wake_all(Simulation& s, const void* on) {
  for (int id = 1; id <= s.count; ++id) {
    if (thread_of(s, id).state == State::kBlocked && thread_of(s, id).on == on) make_ready(s, id);
  }
}

static void run_thread() {
  Simulation& s = *running;
  SimulatedThread& thread = thread_of(s, s.current);
  std::function<void()>* body = thread.body;
  emulator::happens_after(body);
  std::string error;
  try {
    (*body)();
  } catch (const std::exception& exception) {
    error = std::string("an exception has left the thread: ") + exception.what();
  } catch (...) {
    error = "an exception has left the thread";
  }
  if (!error.empty()) end_failed(s, error);
  delete body;
  record(s, Kind::kEnd, 0);
  emulator::happens_before(&thread);  // for the thread that joins this one
  emulator::happens_before(&s);       // for the caller of simulate
  thread.state = State::kEnded;
  ++s.ended;
  wake_all(s, &thread);
}

int add_thread(Simulation& s, std::function<void()>* body) {
  const int id = ++s.count;
  SimulatedThread& thread = thread_of(s, id);
  const Unwatched unwatched;
  thread.body = body;
  thread.fiber = fibers.take(run_thread);
  thread.weight = draw(s);
  make_ready(s, id);
  return id;
}

// Runs a thread until it gives way. Each thread has its own C++ state of exceptions in flight.
static void enter(Simulation& s, int id) {
  SimulatedThread& thread = thread_of(s, id);
  thread.entered = true;
  auto& exceptions = *reinterpret_cast<std::array<uint64_t, 2>*>(abi::__cxa_get_globals());
  const std::array<uint64_t, 2> own = exceptions;
  s.current = id;
  exceptions = thread.exceptions;
  const bool goes_on = emulator::enter_fiber(thread.fiber);
  thread.exceptions = exceptions;
  exceptions = own;
  if (!goes_on) fibers.put_back(thread.fiber);
}

// Called when no thread can run: advances the clock to the first time that a thread waits for. Returns false if no
// thread waits for a time.
static bool advance_clock(Simulation& s) {
  int64_t first = kNever;
  for (int id = 1; id <= s.count; ++id) {
    if (thread_of(s, id).state == State::kBlocked) first = std::min(first, thread_of(s, id).wake_at);
  }
  if (first == kNever) return false;
  s.now = std::max(s.now, first);
  add_to_hash(s, static_cast<uint64_t>(s.now));
  for (int id = 1; id <= s.count; ++id) {
    if (thread_of(s, id).state == State::kBlocked && thread_of(s, id).wake_at <= s.now) make_ready(s, id);
  }
  return true;
}

static void schedule(Simulation& s) {
  while (!s.failed && s.ended < s.count) {
    int next = std::exchange(s.chosen, 0);
    if (next == 0) {
      if (s.ready_count == 0) {
        s.current = 0;
        if (!advance_clock(s)) {
          set_failure(s, "deadlock: nobody can run, and nobody waits for a time");
          return;
        }
      }
      const int place = choose(s);
      next = s.ready[static_cast<size_t>(place)];
      s.ready[static_cast<size_t>(place)] = s.ready[static_cast<size_t>(--s.ready_count)];
    }
    enter(s, next);
  }
}

// Removes the remaining threads of a schedule that has failed.
static void clear(Simulation& s) {
  for (int id = 1; id <= s.count; ++id) {
    const SimulatedThread& thread = thread_of(s, id);
    if (thread.state == State::kEnded) continue;
    if (thread.entered) {
      fibers.abandon(thread.fiber);
    } else {
      delete thread.body;
      fibers.put_back(thread.fiber);
    }
  }
}

Outcome simulate(const Options& options, const std::function<void()>& body) {
#if PYMOE_EMULATOR_THREAD
  // Before a second real thread has existed, libstdc++ counts references without atomics, which ThreadSanitizer would
  // report as races.
  static const bool counts_atomically = (std::thread([] {}).join(), true);
  static_cast<void>(counts_atomically);
#endif
  const auto s = std::make_unique<Simulation>();
  s->options = options;
  s->random = mix(options.seed + 1);
  s->style = static_cast<Style>(options.seed % 4);
  s->spurious = options.seed / 4 % 2 != 0 ? 8 : 0;
  s->next_weights = static_cast<int64_t>(draw_below(*s, 20));
  if (running != nullptr) throw std::logic_error("simulate: within a simulation");
  running = s.get();
  fibers.begin_launch();
  auto* first = new std::function<void()>(body);
  emulator::happens_before(first);
  add_thread(*s, first);
  schedule(*s);
  emulator::happens_after(s.get());
  clear(*s);
  running = nullptr;
  add_to_hash(*s, static_cast<uint64_t>(s->steps));
  return {s->failure, s->hash, s->steps, s->now - kStart};
}

}  // namespace pymoe::simulation
