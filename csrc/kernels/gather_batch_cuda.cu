// Copies many blocks of bytes into one on the GPU, with one launch for up to 2000 of them.
//
// The table of pointers and starts is a parameter of the kernel: the driver copies it when the launch is enqueued, or
// captured into a graph, so there is no staging buffer to allocate, to wait for or to keep alive. A table has one of
// two sizes, 4 KB for common calls and the 32 KB that CUDA allows from 12.1 on. Blocks that do not fit into one table
// go to further launches; empty blocks are omitted.
//
// The output, not the list, is cut over the grid, 16 KiB per block, so one large tensor and a thousand small ones are
// distributed equally well. A block looks up its first and last byte in the table (all threads read the same entry: a
// broadcast from the constant cache) and keeps the entries between them in shared memory. A thread owns four 16-byte
// words of the output, and finds the source of each. If the sources of all four are aligned like the output, the words
// are copied as wholes, with four loads in flight; otherwise each is read in pieces as wide as its source's alignment
// allows, at most 8 bytes, and still written as 16 bytes. Words that two sources share, and the ends of the output, are
// copied byte by byte.
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/gather_batch.h"

namespace pymoe::cuda {
namespace {

using Byte = unsigned char;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // number of words that a thread copies
constexpr int kWord = 16;
constexpr int64_t kBlockBytes = int64_t{kThreads} * kUnroll * kWord;

constexpr int kFew = 250;  // 4 KB
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
constexpr int kMany = kFew;
#else
constexpr int kMany = 2000;  // 32 KB
#endif

template <int kMost>
struct Table {
  const Byte* sources[kMost];
  int64_t starts[kMost + 1];  // strictly ascending from 0
};

// Returns the index of the block that contains byte `at` of the output. The index must lie in first..last.
PYMOE_DEVICE int find_block(const int64_t* starts, int64_t at, int first, int last) {
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (starts[middle] <= at) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

template <typename Piece>
PYMOE_DEVICE void copy_word(Byte* to, const Byte* from) {
  using Pieces = Pack<Piece, kWord / static_cast<int>(sizeof(Piece))>;
  Pieces pieces;
#pragma unroll
  for (int i = 0; i < Pieces::kSize; ++i) pieces[i] = __ldg(reinterpret_cast<const Piece*>(from) + i);
  store_pack(to, pieces);
}

PYMOE_DEVICE void copy_word_from_anywhere(Byte* to, const Byte* from) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (address % 8 == 0) {
    copy_word<uint2>(to, from);
  } else if (address % 4 == 0) {
    copy_word<unsigned int>(to, from);
  } else if (address % 2 == 0) {
    copy_word<unsigned short>(to, from);
  } else {
    copy_word<Byte>(to, from);
  }
}

template <int kMost>
__global__ void __launch_bounds__(kThreads) gather_batch_kernel(const Table<kMost> table, int count, Byte* out) {
  PYMOE_SHARED(const Byte*, sources, kMost);
  PYMOE_SHARED(int64_t, starts, kMost + 1);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t total = table.starts[count];
  // Words are aligned in memory, so the first one may begin before the output.
  const int64_t head = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % kWord);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kBlockBytes - head;
  const int64_t end = begin + kBlockBytes < total ? begin + kBlockBytes : total;
  const int first = find_block(table.starts, begin < 0 ? 0 : begin, 0, count - 1);
  const int last = find_block(table.starts, end - 1, first, count - 1);
  for (int i = first + thread; i <= last; i += kThreads) {
    sources[i - first] = table.sources[i];
    starts[i - first] = table.starts[i];
  }
  if (thread == 0) starts[last + 1 - first] = table.starts[last + 1];
  __syncthreads();

  const Byte* from[kUnroll];  // null if the word is not a whole word of one source
  int block[kUnroll];
  bool aligned = true;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = begin + (u * kThreads + thread) * kWord;
    block[u] = find_block(starts, at, 0, last - first);
    const bool whole = at >= 0 && at + kWord <= starts[block[u] + 1];
    from[u] = whole ? sources[block[u]] + (at - starts[block[u]]) : nullptr;
    aligned = aligned && whole && reinterpret_cast<uintptr_t>(from[u]) % kWord == 0;
  }
  if (aligned) {
    uint4 words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) words[u] = __ldg(reinterpret_cast<const uint4*>(from[u]));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      *reinterpret_cast<uint4*>(out + begin + (u * kThreads + thread) * kWord) = words[u];
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = begin + (u * kThreads + thread) * kWord;
    if (from[u] != nullptr) {
      copy_word_from_anywhere(out + at, from[u]);
      continue;
    }
    int source = block[u];
    for (int64_t byte = at < 0 ? 0 : at; byte < at + kWord && byte < end; ++byte) {
      while (byte >= starts[source + 1]) ++source;
      out[byte] = __ldg(sources[source] + (byte - starts[source]));
    }
  }
}

// Copies the first non-empty blocks of the list, at most kMost, to `out`. Returns how many blocks of the list are done,
// including empty ones.
template <int kMost>
int64_t gather_some(const void* const* sources, const int64_t* starts, int64_t count, Byte* out, void* stream) {
  Table<kMost> table;
  int filled = 0;
  int64_t i = 0;
  table.starts[0] = 0;
  for (; i < count && filled < kMost; ++i) {
    if (starts[i + 1] == starts[i]) continue;
    table.sources[filled] = static_cast<const Byte*>(sources[i]);
    table.starts[++filled] = starts[i + 1] - starts[0];
  }
  if (filled > 0) {
    const auto head = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % kWord);
    launch("gather_batch", gather_batch_kernel<kMost>, {ceil_div(head + table.starts[filled], kBlockBytes), kThreads},
           stream, table, filled, out);
  }
  return i;
}

}  // namespace

void gather_batch(const GatherBatchArguments& a, void* stream) {
  for (int64_t done = 0; done < a.count;) {
    const int64_t left = a.count - done;
    const auto gather = left <= kFew ? &gather_some<kFew> : &gather_some<kMany>;
    done += gather(a.sources + done, a.starts + done, left, static_cast<Byte*>(a.out) + a.starts[done], stream);
  }
}

}  // namespace pymoe::cuda
