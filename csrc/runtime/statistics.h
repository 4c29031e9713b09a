// The counters of a pool: relaxed atomics, so that readers never delay threads that run requests.
//
// A snapshot is not consistent: counters may change while others are read.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

namespace pymoe::runtime {

// Counts values in buckets whose width grows with the value: one bucket for each value up to 3, then four buckets for
// every power of two. A quantile above 3, taken as the middle of a bucket, is off by at most an eighth.
class Histogram {
 public:
  static constexpr int kBuckets = 252;

  static int bucket(uint64_t value) {
    if (value < 4) return static_cast<int>(value);
    const int top = std::bit_width(value) - 1;
    return (top - 1) * 4 + static_cast<int>((value >> (top - 2)) & 3);
  }

  void add(uint64_t value) {
    counts_[static_cast<size_t>(bucket(value))].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
    uint64_t seen = max_.load(std::memory_order_relaxed);
    while (seen < value && !max_.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }

  struct Snapshot {
    std::vector<uint64_t> counts;  // (kBuckets,)
    uint64_t sum;
    uint64_t max;
  };

  Snapshot snapshot() const {
    Snapshot result{std::vector<uint64_t>(kBuckets), sum_.load(std::memory_order_relaxed),
                    max_.load(std::memory_order_relaxed)};
    for (size_t i = 0; i < kBuckets; ++i) result.counts[i] = counts_[i].load(std::memory_order_relaxed);
    return result;
  }

 private:
  std::array<std::atomic<uint64_t>, kBuckets> counts_{};
  std::atomic<uint64_t> sum_{0};
  std::atomic<uint64_t> max_{0};
};

class Counter {
 public:
  void add(int64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

struct PoolStatistics {
  // Numbers of requests. At rest, submitted = queued + running + completed + failed + cancelled + expired. (A request
  // larger than a batch counts as both queued and running from its first batch to its last.)
  Counter submitted, completed, failed, cancelled, expired;
  Counter rejected;                      // refused because the queue was full
  Counter queued, queued_rows, running;  // current numbers
  Counter batches, rows;                 // batches that ran, including failed ones
  Histogram batch_rows;
  Histogram wait_ns;     // time of a request from submission to its first batch
  Histogram latency_ns;  // time of a request from submission to its end, if it ran
  Histogram process_ns;  // time of a batch
};

}  // namespace pymoe::runtime
