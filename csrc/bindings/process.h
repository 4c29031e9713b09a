// Interpreter exit and fork: ends the runtime's work before the interpreter ends, and resets state after a fork.
//
//   - Importing starts no thread. At interpreter exit an atexit hook cancels queued work and joins all workers, because
//     a thread that asks for the GIL of an interpreter that is gone never gets it.
//   - Every object with workers is registered here, and kept until its workers have ended, even if its Python object is
//     garbage-collected earlier. So no destructor waits, whichever thread runs it.
//   - After a fork the child has none of the parent's workers, and waiting for them raises an error.
#pragma once

#include "bindings/gil.h"

#include <functional>
#include <memory>
#include <utility>

#include "runtime/worker_pool.h"

namespace pymoe::bindings {

// An object with its own threads, which call Python.
class Stoppable {
 public:
  virtual ~Stoppable() = default;
  // Requests a stop and returns immediately; `how` says whether work that has not started still runs or is dropped.
  virtual void request_stop(runtime::Stop how) = 0;
  // Waits until `until` at most; returns true once every thread has ended and is joined.
  virtual bool stopped_by(Clock::time_point until) = 0;
  // Returns true on one of the object's own threads, which cannot wait for the object's end.
  virtual bool on_worker() const = 0;
};

// A Stoppable that wraps a WorkerPool or an Executor of the runtime.
template <typename Threads>
class Stopping final : public Stoppable {
 public:
  template <typename... Arguments>
  explicit Stopping(Arguments&&... arguments) : threads(std::forward<Arguments>(arguments)...) {}
  void request_stop(runtime::Stop how) override { threads.request_stop(how); }
  bool stopped_by(Clock::time_point until) override { return threads.wait_stopped_until(until); }
  bool on_worker() const override { return threads.on_worker(); }

  Threads threads;
};

// Keeps `stoppable` until its threads have ended and nothing else refers to it: later calls of this function then
// release it. Throws std::runtime_error if the interpreter is exiting. Call it without the GIL.
void keep_until_stopped(std::shared_ptr<Stoppable> stoppable);

// Stops `stoppable` and waits until every thread has ended. Call it under the GIL. Throws the exception of a signal
// handler.
void stop(Stoppable& stoppable, runtime::Stop how);

// Returns a number that every fork increases in the child. An object that was made in another generation has no threads
// in this process.
int generation();

// Throws std::runtime_error, "WHERE: this KIND was created before a fork ...", unless `created` is this generation.
void require_this_process(int created, const char* where, const char* kind);

// Runs `work`, the whole life of a worker thread, under one Python thread state, so that thread-local data outlives a
// task.
void with_thread_state(const std::function<void()>& work);
// Does the same as with_thread_state, for a worker of a Runtime: on_server_thread is then true, too.
void serve_with_thread_state(const std::function<void()>& work);
// on_worker_thread returns true inside either of the two functions above, on_server_thread inside the second one.
bool on_worker_thread();
bool on_server_thread();

}  // namespace pymoe::bindings
