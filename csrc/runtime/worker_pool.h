// WorkerPool: a fixed number of threads that run submitted functions, first come, first served.
//
//     WorkerPool pool(4);
//     Future<int> answer = pool.submit([] { return 6 * 7; });
//     answer.get();
//     pool.stop();
//
// Outcome   What a task returns or throws appears in its future; an exception in a task touches nothing else. The
//           function object is destroyed on the worker before its future is done, never under a lock of the pool.
// Stopping  request_stop refuses further tasks from then on and returns at once. With Stop::kDrain everything queued
//           still runs; with Stop::kCancel what has not started ends with Cancelled. A task that runs is never
//           interrupted. stop waits, too, until every worker has ended. Both may be called any number of times and
//           from several threads; the first call that asks for kCancel drops what is then in the queue. The
//           destructor stops with kDrain.
// Errors    submit after a stop throws StoppedError. Waiting for the workers from one of them can never end, so it
//           throws std::logic_error. The constructor throws std::invalid_argument for fewer than one worker, and if
//           the system refuses a thread it ends those already running and throws on.
// Threads   All functions may be called from any thread, including from tasks (stop and the destructor excepted).
//           No thread exists before the constructor or after stop.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/future.h"

namespace pymoe::runtime {

class StoppedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Stop { kDrain, kCancel };

// Something the pool can run. Exactly one of the two is called, once.
class Task {
 public:
  virtual ~Task() = default;
  virtual void run() noexcept = 0;
  virtual void cancel() noexcept = 0;
};

// A function and the state of its future, in one allocation.
template <typename Function>
class FunctionTask final : public Task, public FutureState<std::invoke_result_t<Function&>> {
  using Result = std::invoke_result_t<Function&>;
  using Value = typename FutureState<Result>::Value;

 public:
  explicit FunctionTask(Function function) : function_(std::move(function)) {}

  void run() noexcept override {
    std::optional<Value> value;
    std::exception_ptr error;
    try {
      if constexpr (std::is_void_v<Result>) {
        (*function_)();
        value.emplace();
      } else {
        value.emplace((*function_)());
      }
    } catch (...) {
      error = std::current_exception();
    }
    function_.reset();
    if (error) {
      this->fail(std::move(error));
    } else {
      this->finish(std::move(*value));
    }
  }

  void cancel() noexcept override {
    function_.reset();
    this->fail(std::make_exception_ptr(Cancelled("the task was cancelled: its pool stopped before it had started")));
  }

 private:
  std::optional<Function> function_;
};

class WorkerPool {
 public:
  // What every worker does: `around(work)` must call work() once, and may set up and tear down around it.
  using Around = std::function<void(const std::function<void()>& work)>;

  explicit WorkerPool(int workers, Around around = {});
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  template <typename Function>
  auto submit(Function&& function) {
    using Stored = std::decay_t<Function>;
    auto task = std::make_shared<FunctionTask<Stored>>(std::forward<Function>(function));
    enqueue(task);
    return Future<std::invoke_result_t<Stored&>>(std::move(task));
  }

  void request_stop(Stop how);
  void stop(Stop how = Stop::kDrain);

  // The waiting half of stop, in slices: true once every worker has ended. Call after request_stop.
  bool wait_stopped_for(std::chrono::milliseconds duration);

  int workers() const { return workers_; }
  // True on a thread of this pool.
  bool on_worker() const;

 private:
  void enqueue(std::shared_ptr<Task> task);
  void work();
  void refuse_on_worker() const;
  void join();

  const int workers_;
  const Around around_;
  std::mutex mutex_;                 // guards queue_, stopping_ and running_
  std::condition_variable changed_;  // a worker has something to do: a task, or to stop
  std::condition_variable ended_;    // running_ has reached 0
  std::deque<std::shared_ptr<Task>> queue_;
  bool stopping_ = false;
  int running_ = 0;        // workers that have not ended
  std::mutex join_mutex_;  // guards threads_
  std::vector<std::thread> threads_;
};

}  // namespace pymoe::runtime
