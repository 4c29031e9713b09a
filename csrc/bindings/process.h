// The process around the runtime: what must have ended before the interpreter does, and what a fork leaves behind.
//
//   - Importing starts no thread. At interpreter exit an atexit hook cancels what is queued and joins all workers: a
//     thread that asks for the GIL of an interpreter that has gone never gets it.
//   - What has workers is registered here, and stays until they have ended, also if its Python object is collected
//     before, on whatever thread: nothing waits in a destructor.
//   - After a fork the child has none of the parent's workers. It gets an error where it would wait for them.
#pragma once

#include "bindings/gil.h"

#include <functional>
#include <memory>
#include <utility>

#include "runtime/worker_pool.h"

namespace pymoe::bindings {

// Something with threads of its own that call Python.
class Stoppable {
 public:
  virtual ~Stoppable() = default;
  // Returns at once; what has not started runs, or is dropped.
  virtual void request_stop(runtime::Stop how) = 0;
  // True once every thread has ended, and then they are joined.
  virtual bool stopped_by(Clock::time_point until) = 0;
  // True on one of its threads, which cannot wait for its own end.
  virtual bool on_worker() const = 0;
};

// A WorkerPool or an Executor of the runtime.
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

// Keeps `stoppable` until it has stopped and nobody else refers to it. Throws std::runtime_error at exit. No GIL.
void keep_until_stopped(std::shared_ptr<Stoppable> stoppable);

// Stops it and waits until every thread has ended. Under the GIL; throws what a signal handler raised.
void stop(Stoppable& stoppable, runtime::Stop how);

// Counts forks: what was created in another generation has no threads in this process.
int generation();

// Throws std::runtime_error, "WHERE: this KIND was created before a fork ...", in a generation other than `created`.
void require_this_process(int created, const char* where, const char* kind);

// Gives a worker one Python thread state for its whole life, so that thread-local data outlives a task.
void with_thread_state(const std::function<void()>& work);
// The same for workers of a Runtime.
void serve_with_thread_state(const std::function<void()>& work);
// True on a thread that is inside one of these; inside the second.
bool on_worker_thread();
bool on_server_thread();

}  // namespace pymoe::bindings
