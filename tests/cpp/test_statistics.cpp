#include <doctest/doctest.h>

#include "runtime/statistics.h"

using namespace pymoe::runtime;

namespace {

// Returns the smallest value of a bucket. The bucket after the last one would begin at 2^64.
uint64_t lowest(int bucket) {
  if (bucket < 4) return static_cast<uint64_t>(bucket);
  return static_cast<uint64_t>(4 + bucket % 4) << (bucket / 4 - 1);
}

}  // namespace

TEST_CASE("a histogram's buckets are in order and hold what they say") {
  CHECK(Histogram::bucket(UINT64_MAX) == Histogram::kBuckets - 1);
  for (int i = 0; i < Histogram::kBuckets; ++i) {
    CHECK(Histogram::bucket(lowest(i)) == i);
    if (i > 0) CHECK(Histogram::bucket(lowest(i) - 1) == i - 1);
  }
  Histogram histogram;
  for (uint64_t value = 0; value < 1000; ++value) histogram.add(value);
  const auto seen = histogram.snapshot();
  CHECK(seen.sum == 499500);
  CHECK(seen.max == 999);
  uint64_t count = 0;
  for (const uint64_t n : seen.counts) count += n;
  CHECK(count == 1000);
}
