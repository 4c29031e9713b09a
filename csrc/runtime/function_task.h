// FunctionTask: a function as a job, and the state of its future, in one allocation.
#pragma once

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/future.h"
#include "runtime/job_queue.h"

namespace pymoe::runtime {

template <typename Function, typename Sync>
class FunctionTask final : public Job, public FutureState<std::invoke_result_t<Function&>, Sync> {
  using Result = std::invoke_result_t<Function&>;
  using Value = typename FutureState<Result, Sync>::Value;

 public:
  template <typename From>
  explicit FunctionTask(From&& function) : function_(std::forward<From>(function)) {}

  bool help() noexcept override {
    if (!this->claim()) return false;
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
      this->complete(std::move(error));
    } else {
      this->finish(std::move(*value));
    }
    return true;
  }

  void run() noexcept override { help(); }

  void cancel() noexcept override {
    if (!this->claim()) return;
    function_.reset();
    this->complete(
        std::make_exception_ptr(Cancelled("the task was cancelled: its pool stopped before it had started")));
  }

 private:
  std::optional<Function> function_;
};

}  // namespace pymoe::runtime
