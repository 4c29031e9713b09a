// Future: where the outcome of a task appears, once.
//
// A task and the futures that look at it share one FutureState. It starts pending and ends exactly once, with a value
// or with an exception; every wait that began before or begins after then returns. Futures are cheap to copy, and
// any number of threads may use copies of one at the same time. A state outlives its pool: an outcome can be read
// after the pool has gone.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

namespace pymoe::runtime {

// The outcome of a task that its pool dropped before it had started.
class Cancelled : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename T>
class FutureState {
 public:
  // void tasks carry an empty value, so that one set of code serves both.
  using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  bool done() const { return done_.load(std::memory_order_acquire); }

  void wait() const {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return done(); });
  }

  // True if the task has ended within `duration`.
  template <typename Rep, typename Period>
  bool wait_for(std::chrono::duration<Rep, Period> duration) const {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, duration, [&] { return done(); });
  }

  // Only after the end: neither ever changes again, so both are read without the lock.
  const std::exception_ptr& error() const { return error_; }
  const Value& value() const { return *value_; }

 protected:
  FutureState() = default;
  ~FutureState() = default;

  void finish(Value value) {
    value_.emplace(std::move(value));
    publish();
  }

  void fail(std::exception_ptr error) {
    error_ = std::move(error);
    publish();
  }

 private:
  void publish() {
    {
      const std::lock_guard lock(mutex_);
      done_.store(true, std::memory_order_release);
    }
    ended_.notify_all();
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::atomic<bool> done_{false};
  std::optional<Value> value_;
  std::exception_ptr error_;
};

template <typename T>
class Future {
 public:
  Future() = default;
  explicit Future(std::shared_ptr<const FutureState<T>> state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state_->done(); }
  void wait() const { state_->wait(); }

  template <typename Rep, typename Period>
  bool wait_for(std::chrono::duration<Rep, Period> duration) const {
    return state_->wait_for(duration);
  }

  // Waits; then the value, or the task's exception thrown on. The value lives as long as a copy of this future does.
  decltype(auto) get() const {
    state_->wait();
    if (state_->error()) std::rethrow_exception(state_->error());
    if constexpr (!std::is_void_v<T>) return (state_->value());
  }

 private:
  std::shared_ptr<const FutureState<T>> state_;
};

}  // namespace pymoe::runtime
