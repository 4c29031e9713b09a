// Functions as jobs of a worker pool, with futures: tests use them to hand work to a pool and check its results. Also
// get(), which helps with the calls of a run and throws its error.
//
// wait() and get() help: a task that has not started by then runs on the thread that waits. wait_until does not.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "runtime/completion.h"
#include "runtime/parallel_for.h"
#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template <typename T, typename Sync>
struct FutureState : Completion<Sync> {
  // Runs the task on this thread if no other thread has claimed it; returns whether it did.
  virtual bool help() noexcept = 0;

  std::optional<std::conditional_t<std::is_void_v<T>, std::monostate, T>> value;
};

template <typename T, typename Sync = SystemSync>
class Future {
 public:
  Future() = default;
  explicit Future(std::shared_ptr<FutureState<T, Sync>> state) : state_(std::move(state)) {}

  bool done() const { return state_->done(); }
  bool help() const { return state_->help(); }
  bool wait_until(typename Sync::Time until) const { return state_->wait_until(until); }
  bool wait_for(typename Sync::Duration duration) const { return wait_until(Sync::now() + duration); }

  void wait() const {
    if (!state_->done() && !state_->help()) state_->wait_until(Sync::Time::max());
  }

  decltype(auto) get() const {
    wait();
    if (state_->error()) std::rethrow_exception(state_->error());
    if constexpr (!std::is_void_v<T>) return std::as_const(*state_->value);
  }

 private:
  std::shared_ptr<FutureState<T, Sync>> state_;
};

template <typename Function, typename Sync>
class FunctionTask final : public Job, public FutureState<std::invoke_result_t<Function&>, Sync> {
 public:
  template <typename From>
  explicit FunctionTask(From&& function) : function_(std::forward<From>(function)) {}

  bool help() noexcept override {
    if (!this->claim()) return false;
    std::exception_ptr error;
    try {
      if constexpr (std::is_void_v<std::invoke_result_t<Function&>>) {
        (*function_)();
      } else {
        this->value.emplace((*function_)());
      }
    } catch (...) {
      error = std::current_exception();
    }
    function_.reset();  // destroyed before the future is done
    this->complete(std::move(error));
    return true;
  }

  void run() noexcept override { help(); }

  void cancel() noexcept override {
    if (!this->claim()) return;
    function_.reset();
    this->complete(std::make_exception_ptr(Cancelled("the task was cancelled before it had started")));
  }

 private:
  std::optional<Function> function_;
};

template <typename Sync, typename Function>
auto submit(WorkerPool<Sync>& pool, Function&& function) {
  using Stored = std::decay_t<Function>;
  auto task = std::make_shared<FunctionTask<Stored, Sync>>(std::forward<Function>(function));
  if (!pool.post(task, Sync::now())) throw StoppedError("submit after the pool was stopped");
  return Future<std::invoke_result_t<Stored&>, Sync>(std::move(task));
}

// Helps until the run has ended; throws the run's error, if there is one.
template <typename Sync>
void get(ParallelFor<Sync>& run) {
  run.help_until(Sync::Time::max());
  if (run.error()) std::rethrow_exception(run.error());
}

}  // namespace pymoe::runtime
