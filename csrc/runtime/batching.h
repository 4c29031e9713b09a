// The rule that decides when queued requests become a batch: the options of a pool, and the linger.
//
// The linger is the wait for a fuller batch. docs/concepts/batching.md explains why it exists and when it ends: at the
// latest after the time in the option `linger`; earlier if all expected requests are queued, or if none has arrived for
// the duration of a batch times the patience, an adaptive factor.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace pymoe::runtime {

template <typename Sync>
struct BatchingOptions {
  using Duration = typename Sync::Duration;

  int64_t min_batch_size = 1;       // rows
  int64_t max_batch_size = 4096;    // largest number of rows in a batch; a larger request is run in slices
  std::optional<Duration> timeout;  // longest time that a request waits for min_batch_size rows; none: no limit
  Duration linger = std::chrono::milliseconds(5);
  int64_t capacity = 65536;  // largest number of requests in the queue
  bool isolate = false;      // if a batch fails, run its halves again, so that only bad requests fail

  // Throws std::invalid_argument if an option is out of range.
  void check() const {
    const auto refuse = [](const std::string& rule, int64_t seen) {
      throw std::invalid_argument("TaskPool: " + rule + ", got " + std::to_string(seen));
    };
    if (min_batch_size < 1) refuse("min_batch_size must be at least 1", min_batch_size);
    if (max_batch_size < min_batch_size) {
      refuse("max_batch_size must be at least min_batch_size (" + std::to_string(min_batch_size) + ")", max_batch_size);
    }
    if (capacity < 1) refuse("capacity must be at least 1", capacity);
    if (timeout && *timeout < Duration::zero()) throw std::invalid_argument("TaskPool: timeout must not be negative");
    if (linger < Duration::zero()) throw std::invalid_argument("TaskPool: linger must not be negative");
  }
};

template <typename Sync>
class Linger {
 public:
  using Time = typename Sync::Time;
  using Duration = typename Sync::Duration;

  explicit Linger(Duration limit) : limit_(limit) {}

  // Records that a request was queued. `in_flight`: number of requests that are queued or running, including this one.
  void arrived(Time now, int64_t in_flight) {
    last_event_ = now;
    expected_ = std::max(expected_, in_flight);
  }

  // Records that a batch begins while `queued` requests are in the queue. If more requests were expected, waiting for
  // them was useless, and the patience is halved. If all have arrived, and more than one was expected when the last
  // batch ended, waiting was worthwhile, and the patience is doubled.
  void started(int64_t queued) {
    if (queued < expected_) {
      patience_ = std::max(patience_ / 2, kLeastPatience);
    } else if (promised_ > 1) {
      patience_ = std::min(patience_ * 2, 1.0);
    }
    expected_ = queued;
  }

  void ended(Time now, Duration took) {
    last_event_ = last_end_ = now;
    promised_ = expected_;
    batch_ = batch_ == Duration::zero() ? took : (batch_ * 3 + took) / 4;
  }

  // Returns true if as many requests are queued as can be expected: as many as were queued when the last batch began
  // or, if more, as many as have been in flight since.
  bool complete(int64_t queued) const { return queued >= expected_; }

  // Returns the time until which waiting is worthwhile for an incomplete queue whose oldest request arrived at
  // `oldest`.
  Time until(Time oldest) const {
    const Duration gap = std::min(std::max(batch_, Duration(kLeastGap)), limit_);
    const auto patient_gap = std::chrono::duration_cast<Duration>(gap * patience_);
    return std::min(last_event_ + patient_gap, std::max(oldest, last_end_) + limit_);
  }

 private:
  static constexpr double kLeastPatience = 1.0 / 16;
  // The minimum wait for an arrival, at full patience: the time that threads need to wake up and submit again, even
  // after a short batch.
  static constexpr std::chrono::microseconds kLeastGap{200};

  const Duration limit_;
  int64_t expected_ = 1;
  int64_t promised_ = 1;  // value of expected_ when the last batch ended; above 1: there were requests to wait for
  double patience_ = 1;
  Duration batch_{};   // moving average of the durations of batches
  Time last_event_{};  // time of the last arrival, or of the last end of a batch
  Time last_end_{};
};

}  // namespace pymoe::runtime
