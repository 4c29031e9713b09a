#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_copy.h"
#include "kernels/dispatch.h"

namespace pymoe::cpu {
namespace {

[[noreturn]] void throw_bad_slot(int64_t token, int64_t choice, int64_t slot, int64_t rows) {
  throw std::out_of_range("dispatch: routing.slot must lie in [-1, S) (S = " + std::to_string(rows) + "), got " +
                          std::to_string(slot) + " at [" + std::to_string(token) + ", " + std::to_string(choice) + "]");
}

}  // namespace

void dispatch(const DispatchArguments& a) {
  const auto* x = static_cast<const char*>(a.x);
  auto* out = static_cast<char*>(a.out);
  const int64_t rows = a.tokens * a.choices;
  if (rows == 0 || a.row_bytes == 0) return;
  const bool streaming = can_stream(out, a.row_bytes, rows * a.row_bytes);
  const int64_t grain = std::max<int64_t>(1, (int64_t{64} << 10) / (a.row_bytes * (1 + a.choices)));

  parallel_for(0, a.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const char* row = x + token * a.row_bytes;
      for (int64_t choice = 0; choice < a.choices; ++choice) {
        const int64_t slot = a.slot[token * a.choices + choice];
        if (slot == -1) continue;
        if (slot < 0 || slot >= rows) throw_bad_slot(token, choice, slot, rows);
        char* target = out + slot * a.row_bytes;
        if (streaming) {
          stream_row(target, row, a.row_bytes);
        } else {
          memcpy(target, row, static_cast<size_t>(a.row_bytes));
        }
      }
    }
    if (streaming) finish_streaming();
  });

  const int64_t used = std::clamp<int64_t>(*a.used, 0, rows);
  parallel_for(used, rows, std::max<int64_t>(1, (int64_t{256} << 10) / a.row_bytes), [&](int64_t begin, int64_t end) {
    memset(out + begin * a.row_bytes, 0, static_cast<size_t>((end - begin) * a.row_bytes));
  });
}

}  // namespace pymoe::cpu
