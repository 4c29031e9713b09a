// Fibers: threads that switch to each other explicitly, and the calls that tell a sanitizer about them.
//
// Only emulator.cpp and tests/cpp/scheduler.cpp use this file; they are compiled without sanitizers.
#pragma once

#include <cstddef>
#include <vector>

namespace pymoe::emulator {

struct Fiber;

// Stacks are kept. Every stack ends in an inaccessible page.
//
// ThreadSanitizer treats a fiber as a thread, and all actions of one fiber as ordered. So within a launch no fiber is
// used twice as long as there are enough of them. Launches are ordered anyway, so the next launch uses the fibers
// again.
class FiberPool {
 public:
  FiberPool() = default;
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  void begin_launch();
  // Returns a fiber that will run `body` and then end.
  Fiber* take(void (*body)());
  void put_back(Fiber* fiber);
  // Ends the use of a fiber that will never continue; memory that its stack refers to counts as used, not leaked.
  static void abandon(Fiber* fiber);

 private:
  std::vector<Fiber*> free_, used_;
  size_t count_ = 0, next_used_ = 0;
};

// Runs the fiber until it leaves or ends; false if it has ended.
bool enter_fiber(Fiber* fiber);
// Called on the fiber: returns to the caller of enter_fiber.
void leave_fiber(Fiber* fiber);

// Order for ThreadSanitizer: actions before happens_before(token) are visible after happens_after(token).
void happens_before(void* token);
void happens_after(void* token);

// While such an object lives, ThreadSanitizer ignores the accesses of this fiber. Otherwise a fiber that allocates
// memory would count as its writer, and race with the fiber that uses it.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// Allocates shared memory of a block: exactly sized, with arbitrary contents.
void* shared_block(size_t bytes);
void free_shared_block(void* memory);

// memcpy and memset that a sanitizer does not see.
void copy_bytes(void* to, const void* from, size_t bytes);

}  // namespace pymoe::emulator
