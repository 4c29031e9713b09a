// Source-major gather on the GPU. A group of threads owns a stretch of one token's row, kUnroll words per thread. Each
// thread reads its words once, all of them in flight together, and writes them to the K rows that the token's choices
// own. Words are as wide as alignment allows, 16 bytes in all usual shapes, and neighbouring threads have neighbouring
// words, so every store of a warp is 512 contiguous bytes. A block has as many groups as fit into 256 threads. The size
// of a group is fitted to the row: H 7168 in bf16, 896 words, is one group of 224 threads with 4 words each.
//
// With K = 8, eight times as many bytes are written as read, so stores must be wide and never wait. A token's slots are
// therefore read once per thread, 8 at a time, together with the row. If input and output together are larger than a
// GPU's L2, streaming stores are used (for words of 16 bytes): later reads would not find the rows in L2 anyway.
//
// The same threads then clear the rows from *used on, a share each. This costs nothing if all rows are in use, and has
// the bandwidth of the whole GPU if many are not. A choice whose slot is not in [0, *used) is skipped, so no two blocks
// write to the same address unless two choices name the same slot.
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/dispatch.h"

namespace pymoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // number of words of a row that a thread keeps in registers
constexpr int kSlots = 8;   // number of slots that a thread keeps in registers
constexpr int64_t kLargerThanL2 = int64_t{64} << 20;

struct Shape {
  int64_t tokens;
  int64_t choices;
  int64_t rows;
  int64_t row_words;
  int group;      // threads that share a stretch of a row: kUnroll * group words
  int groups;     // groups of a block, one per token
  int stretches;  // stretches of a row
};

template <typename Word, bool kStreaming>
PYMOE_DEVICE void store_word(Word* to, const Word& word) {
  if constexpr (kStreaming) {
    __stcs(to, word);
  } else {
    *to = word;
  }
}

// Returns how many of the words 0, group, 2 * group, ..., (kUnroll - 1) * group are among the first `left` words.
PYMOE_DEVICE int words_left(int64_t left, int group) {
  int count = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) count += u * group < left ? 1 : 0;
  return count;
}

template <typename Word, bool kStreaming>
__global__ void __launch_bounds__(kThreads, 5)
    dispatch_kernel(const Word* PYMOE_RESTRICT x, const int32_t* PYMOE_RESTRICT slot,
                    const int32_t* PYMOE_RESTRICT used, Word* PYMOE_RESTRICT out, Shape shape) {
  const int32_t named = *used;  // loaded together with the row
  const unsigned stretch = blockIdx.x % static_cast<unsigned>(shape.stretches);
  const unsigned group = threadIdx.x / static_cast<unsigned>(shape.group);
  const int64_t token =
      static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(shape.stretches)) * shape.groups + group;
  const int64_t first = (static_cast<int64_t>(stretch) * kUnroll) * shape.group +
                        (threadIdx.x - group * static_cast<unsigned>(shape.group));
  // The number of the thread's words that lie in the row.
  const int count = token < shape.tokens ? words_left(shape.row_words - first, shape.group) : 0;

  const Word* const from = x + token * shape.row_words + first;
  Word words[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (u < count) words[u] = from[u * shape.group];
  }
  const int64_t in_use = named < 0 ? 0 : named < shape.rows ? named : shape.rows;
  if (count > 0) {
    const int32_t* const slots = slot + token * shape.choices;
    for (int64_t choice = 0; choice < shape.choices; choice += kSlots) {
      int32_t targets[kSlots];
#pragma unroll
      for (int k = 0; k < kSlots; ++k) targets[k] = choice + k < shape.choices ? slots[choice + k] : -1;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        if (targets[k] < 0 || targets[k] >= in_use) continue;
        Word* const to = out + targets[k] * shape.row_words + first;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (u < count) store_word<Word, kStreaming>(to + u * shape.group, words[u]);
        }
      }
    }
  }

  const int64_t unused_words = (shape.rows - in_use) * shape.row_words;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < unused_words; i += stride) {
    store_word<Word, kStreaming>(out + in_use * shape.row_words + i, Word{});
  }
}

template <int kBytes, bool kStreaming>
void dispatch_words(const DispatchArguments& a, void* stream) {
  using Word = word_of_bytes<kBytes>;
  Shape shape{a.tokens, a.choices, a.rows, a.row_bytes / kBytes, 0, 0, 0};
  // Use as few stretches as possible, and a group with enough threads for one stretch: whole warps, or fewer threads
  // for a short row.
  shape.stretches = static_cast<int>(ceil_div(shape.row_words, kUnroll * kThreads));
  const int64_t threads = ceil_div(ceil_div(shape.row_words, shape.stretches), kUnroll);
  shape.group = static_cast<int>(std::min(shape.row_words, ceil_div(threads, kWarp) * kWarp));
  const int64_t tokens = std::max<int64_t>(shape.tokens, 1);  // even without tokens, there may be rows to clear
  shape.groups = static_cast<int>(std::min<int64_t>(kThreads / shape.group, tokens));
  launch("dispatch", dispatch_kernel<Word, kStreaming>,
         {ceil_div(tokens, shape.groups) * shape.stretches, shape.groups * shape.group}, stream, a.x, a.slot, a.used,
         a.out, shape);
}

}  // namespace

void dispatch(const DispatchArguments& a, void* stream) {
  if (a.rows == 0 || a.row_bytes == 0) return;
  const bool streaming = (a.tokens + a.rows) * a.row_bytes > kLargerThanL2;
  switch (widest_access({a.x, a.out}, a.row_bytes)) {
    case 16: return streaming ? dispatch_words<16, true>(a, stream) : dispatch_words<16, false>(a, stream);
    case 8: return dispatch_words<8, false>(a, stream);
    case 4: return dispatch_words<4, false>(a, stream);
    case 2: return dispatch_words<2, false>(a, stream);
    default: return dispatch_words<1, false>(a, stream);
  }
}

}  // namespace pymoe::cuda
