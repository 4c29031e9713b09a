// Future: where the outcome of a task appears, once.
//
// A task and the futures that look at it share one FutureState: a Completion with a value. Futures are cheap to copy,
// and any number of threads may use copies of one at the same time. A state outlives its pool: an outcome can be read
// after the pool has gone.
//
// wait() and get() help: a task that has not started by then runs on the thread that waits, so that tasks that wait for
// tasks never block a pool, however few its workers are. wait_until and wait_for do not help, since a task may take
// longer than they have time. help() is the helping alone.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "runtime/completion.h"
#include "runtime/sync.h"

namespace pymoe::runtime {

template <typename T, typename Sync>
class FutureState : public Completion<Sync> {
 public:
  // void tasks carry an empty value, so that one set of code serves both.
  using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  // Runs the task here if nobody else has claimed it; true if it did.
  virtual bool help() noexcept = 0;

  // Only after an end without an error.
  const Value& value() const { return *value_; }

 protected:
  FutureState() = default;

  void finish(Value value) {
    value_.emplace(std::move(value));
    this->complete();
  }

 private:
  std::optional<Value> value_;
};

template <typename T, typename Sync = SystemSync>
class Future {
 public:
  using State = FutureState<T, Sync>;

  Future() = default;
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state_->done(); }
  bool help() const { return state_->help(); }

  void wait() const {
    if (!state_->done() && !state_->help()) state_->wait();
  }

  // True if the task has ended by `until`, or within `duration`.
  bool wait_until(typename Sync::Time until) const { return state_->wait_until(until); }
  bool wait_for(typename Sync::Duration duration) const {
    return state_->done() || state_->wait_until(Sync::now() + duration);
  }

  // Waits; then the value, or the task's exception thrown on. The value lives as long as a copy of this future does.
  decltype(auto) get() const {
    wait();
    if (state_->error()) std::rethrow_exception(state_->error());
    if constexpr (!std::is_void_v<T>) return (state_->value());
  }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace pymoe::runtime
