#include "kernels/gather_batch.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/parallel.h"

namespace pymoe::cpu {

void gather_batch(const GatherBatchArguments& a) {
  constexpr int64_t kGrain = int64_t{64} << 10;
  parallel_for(0, a.starts[a.count], kGrain, [&](int64_t begin, int64_t end) {
    // Find the block that contains `begin`: the last one that starts at or before it. Empty blocks with the same start
    // come earlier.
    int64_t block = std::upper_bound(a.starts, a.starts + a.count + 1, begin) - a.starts - 1;
    for (int64_t at = begin; at < end; ++block) {
      const int64_t until = std::min(end, a.starts[block + 1]);
      if (until == at) continue;
      memcpy(static_cast<char*>(a.out) + at, static_cast<const char*>(a.sources[block]) + (at - a.starts[block]),
             static_cast<size_t>(until - at));
      at = until;
    }
  });
}

}  // namespace pymoe::cpu
