// Source-major gather on the GPU. A group of threads owns a token: every thread holds one vector of the token's row
// at a time and writes it to the K rows that the token's choices own, so a row is read once whatever K is. Vectors
// are as wide as alignment allows, 16 bytes in all usual shapes. Blocks past the tokens clear the unused rows.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/dispatch.h"

namespace pymoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kClearBlocks = 32;

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const Word* PYMOE_RESTRICT x, const int32_t* PYMOE_RESTRICT slot, const int32_t* PYMOE_RESTRICT used,
                    Word* PYMOE_RESTRICT out, int64_t tokens, int64_t choices, int64_t row_words, int group,
                    int64_t token_blocks) {
  const int64_t rows = tokens * choices;
  if (blockIdx.x < token_blocks) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / group) + threadIdx.x / group;
    if (token >= tokens) return;
    const Word* row = x + token * row_words;
    for (int64_t column = threadIdx.x % group; column < row_words; column += group) {
      const Word value = row[column];
      for (int64_t choice = 0; choice < choices; ++choice) {
        const int64_t target = slot[token * choices + choice];
        if (target >= 0 && target < rows) out[target * row_words + column] = value;
      }
    }
    return;
  }
  const int64_t in_use = *used < 0 ? 0 : *used;
  const int64_t words = (rows - in_use) * row_words;
  const int64_t stride = static_cast<int64_t>(kClearBlocks) * kThreads;
  for (int64_t i = (blockIdx.x - token_blocks) * kThreads + threadIdx.x; i < words; i += stride) {
    out[in_use * row_words + i] = Word{};
  }
}

template <int kBytes>
void dispatch_words(const DispatchArguments& a, void* stream) {
  using Word = typename WordOf<kBytes>::type;
  const int64_t row_words = a.row_bytes / kBytes;
  int group = kWarp;  // threads a token: enough to cover its row once, whole warps, at most the block
  while (group < kThreads && group < row_words) group *= 2;
  const int64_t token_blocks = ceil_div(a.tokens, kThreads / group);
  launch("dispatch", dispatch_kernel<Word>, {token_blocks + kClearBlocks, kThreads}, stream,
         static_cast<const Word*>(a.x), a.slot, a.used, static_cast<Word*>(a.out), a.tokens, a.choices, row_words, group,
         token_blocks);
}

}  // namespace

void dispatch(const DispatchArguments& a, void* stream) {
  if (a.tokens == 0 || a.choices == 0 || a.row_bytes == 0) return;
  switch (widest_access({a.x, a.out}, a.row_bytes)) {
    case 16: return dispatch_words<16>(a, stream);
    case 8: return dispatch_words<8>(a, stream);
    case 4: return dispatch_words<4>(a, stream);
    default: return dispatch_words<2>(a, stream);
  }
}

}  // namespace pymoe::cuda
