// Fibers: threads that give way to each other by hand, and what a sanitizer must be told of them.
//
// Everything here is used by emulator.cpp and tests/cpp/scheduler.cpp alone, which are compiled without sanitizers.
#pragma once

#include <cstddef>
#include <vector>

namespace pymoe::emulator {

struct Fiber;

// Stacks are kept. Every stack ends in a page that must not be touched.
//
// To ThreadSanitizer a fiber is a thread with a past, and what one fiber does is in order. So within a launch no fiber
// is used twice, while there are enough of them; launches are in order anyway, so the next one takes them again.
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
  // The fiber will never go on; what its stack refers to counts as in use.
  static void abandon(Fiber* fiber);

 private:
  std::vector<Fiber*> free_, used_;
  size_t count_ = 0, next_used_ = 0;
};

// Runs the fiber until it leaves or ends; false if it has ended.
bool enter_fiber(Fiber* fiber);
// Called on the fiber: goes back to where enter_fiber was called.
void leave_fiber(Fiber* fiber);

// Order for ThreadSanitizer: what came before happens_before(token) is seen after happens_after(token).
void happens_before(void* token);
void happens_after(void* token);

// While one lives, ThreadSanitizer takes no notice of what this fiber does: to it, a fiber that allocates memory has
// written it, and that would be a race with the fiber that uses it.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// Shared memory of a block: exactly sized, with arbitrary contents.
void* shared_block(size_t bytes);
void free_shared_block(void* memory);

// memcpy and memset that a sanitizer does not see.
void copy_bytes(void* to, const void* from, size_t bytes);

}  // namespace pymoe::emulator
