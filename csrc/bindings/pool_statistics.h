// A pool's counters as Python's statistics read them.
#pragma once

#include "bindings/gil.h"
#include "runtime/statistics.h"

namespace pymoe::bindings {

// A dict: integers by name; histograms as (counts of the buckets, sum, largest value).
Ref snapshot(const runtime::PoolStatistics& statistics);

}  // namespace pymoe::bindings
