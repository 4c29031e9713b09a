// Asks the system to read the weights of the chosen experts ahead, from the files that they are mapped from.
//
// Without this, computing faults the pages in one after the other, and each fault waits for the disk. The system also
// reads around every fault (up to the disk's read_ahead_kb); with a large value, much of that belongs to experts that
// were not chosen. A request returns before its data have been read, so the disk works on all of them while the first
// experts are computed.
//
// This is advice only: it never changes memory, and if it fails the pages are read on first use. So errors are ignored.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pymoe::ops {

// Selects the pages to ask for: none, those that are not in memory, or all. kAll is for files that the process neither
// owns nor may write: mincore(2) does not tell which of their pages are in memory.
enum class Prefetch : int64_t { kNothing, kMissing, kAll };

// The size of a request: the default of read_ahead_kb. Linux silently cuts a request to the larger of the disk's
// largest request and its read_ahead_kb (mm/readahead.c).
constexpr uintptr_t kRequest = uintptr_t{128} << 10;

// Asks the system for pages of the `bytes` bytes from `data` on. `what` selects them and must not be kNothing; with
// kMissing, requests without a missing page are left out. Asking for pages that are in memory takes ten times as long
// as finding out which pages are missing.
inline void prefetch(const void* data, size_t bytes, Prefetch what) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto from = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = from / page * page, end = (from + bytes + page - 1) / page * page;
  std::vector<unsigned char> in_memory(what == Prefetch::kMissing ? (end - begin) / page : 0);
  if (!in_memory.empty()) mincore(reinterpret_cast<void*>(begin), end - begin, in_memory.data());
  const auto is_missing = [](unsigned char state) { return (state & 1) == 0; };
  for (uintptr_t at = begin; at < end; at += kRequest) {
    const uintptr_t size = std::min(kRequest, end - at);
    if (!in_memory.empty()) {
      const auto first = in_memory.begin() + static_cast<ptrdiff_t>((at - begin) / page);
      if (std::none_of(first, first + static_cast<ptrdiff_t>(size / page), is_missing)) continue;
    }
    madvise(reinterpret_cast<void*>(at), size, MADV_WILLNEED);
  }
}

// Asks the system to read the weights of the experts that have rows. `weights` is (E, ...); unless it is contiguous,
// does nothing.
inline void prefetch_chosen(const torch::stable::Tensor& weights, const torch::stable::Tensor& offsets, Prefetch what) {
  if (what == Prefetch::kNothing || weights.dim() == 0 || !weights.is_contiguous()) return;
  const int64_t experts = std::min(weights.size(0), offsets.numel() - 1);
  const auto* bounds = static_cast<const int32_t*>(offsets.const_data_ptr());
  const auto* data = static_cast<const char*>(weights.const_data_ptr());
  const size_t bytes =
      experts > 0 ? static_cast<size_t>(weights.numel() / weights.size(0)) * weights.element_size() : 0;
  for (int64_t e = 0; e < experts; ++e)
    if (bounds[e] < bounds[e + 1]) prefetch(data + static_cast<size_t>(e) * bytes, bytes, what);
}

}  // namespace pymoe::ops
