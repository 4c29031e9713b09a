// Packs strided memory into tiles for gemm_amx.h (see gemm_amx.h; no include guard on purpose).
//
// An operand is a matrix of items by steps of k; items are the rows of A or the columns of B. A tile contains 16 items
// by 32 steps, 1 KiB. A row of a left tile is an item, and a row of a right tile is a pair of steps. Missing items and
// steps are zeros in a tile.

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr int64_t kTileItems = 16, kTileDepth = 32;
inline constexpr int64_t kTileElements = 512, kTileBytes = 1024;
inline constexpr int64_t kTileSums = 256;  // number of sums in a tile of C

// The memory of an operand. `items` and `steps` are orders: item i is stored at position items[i], step p at position
// steps[p]. A null pointer stands for the natural order. With `items`, each item must be contiguous along k; with
// `steps`, each step must be contiguous along the items (see gemm.h).
struct TileSource {
  const BFloat16* data;
  int64_t item_stride;
  int64_t k_stride;
  const int32_t* items;
  const int32_t* steps;

  PYMOE_INLINE const BFloat16* at(int64_t item, int64_t p) const {
    return data + place_of(items, item) * item_stride + place_of(steps, p) * k_stride;
  }
};

// load_tile_row and load_tile_pairs return one row of a tile, 16 words of 32 bits: from up to 32 elements, or from up
// to 16 elements of each of two lines, paired. With `count`, a null source gives zeros.
#if PYMOE_ISA_LEVEL == 4
typedef vfloat TileRow;
PYMOE_INLINE TileRow load_tile_row(const BFloat16* source) { return (vfloat)_mm512_loadu_si512(source); }
PYMOE_INLINE TileRow load_tile_row(const BFloat16* source, int64_t count) {
  if (source == nullptr) return TileRow{};
  return (vfloat)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), source);
}
PYMOE_INLINE __m512i widen_half(const BFloat16* source) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
PYMOE_INLINE __m512i widen_half(const BFloat16* source, int64_t count) {
  if (source == nullptr) return _mm512_setzero_si512();
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), source));
}
PYMOE_INLINE TileRow load_tile_pairs(const BFloat16* even, const BFloat16* odd) {
  return (vfloat)_mm512_or_si512(widen_half(even), _mm512_slli_epi32(widen_half(odd), 16));
}
PYMOE_INLINE TileRow load_tile_pairs(const BFloat16* even, const BFloat16* odd, int64_t count) {
  return (vfloat)_mm512_or_si512(widen_half(even, count), _mm512_slli_epi32(widen_half(odd, count), 16));
}
#else
struct TileRow {
  uint32_t words[16];
};
PYMOE_INLINE TileRow load_tile_row(const BFloat16* source, int64_t count = kTileDepth) {
  TileRow row = {};
  if (source != nullptr) memcpy(row.words, source, static_cast<size_t>(count) * sizeof(BFloat16));
  return row;
}
PYMOE_INLINE TileRow load_tile_pairs(const BFloat16* even, const BFloat16* odd, int64_t count = kTileItems) {
  TileRow row = {};
  for (int64_t i = 0; i < count; ++i) {
    if (even != nullptr) row.words[i] = even[i].bits;
    if (odd != nullptr) row.words[i] |= static_cast<uint32_t>(odd[i].bits) << 16;
  }
  return row;
}
PYMOE_INLINE void transpose(TileRow (&rows)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) std::swap(rows[i].words[j], rows[j].words[i]);
  }
}
#endif

PYMOE_INLINE void store_tile(const TileRow (&rows)[16], BFloat16* target) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) memcpy(target + i * kTileDepth, &rows[i], sizeof(rows[i]));
}

// Packs a tile of items that are contiguous along k: `k` elements of each, starting at lines[i] + p, and zeros for null
// lines, which must come last.
template <bool kRight>
PYMOE_INLINE void pack_lines(const BFloat16* const (&lines)[16], int64_t p, int64_t k, BFloat16* target) {
  TileRow rows[16];
  if (k == kTileDepth && lines[15] != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = load_tile_row(lines[i] + p);
  } else {
    for (int i = 0; i < 16; ++i) rows[i] = load_tile_row(lines[i] == nullptr ? nullptr : lines[i] + p, k);
  }
  if constexpr (kRight) transpose(rows);
  store_tile(rows, target);
}

// Packs a tile from steps whose items are contiguous: `items` elements of each step, starting at lines[p] + first, and
// zeros for null lines, which must come last.
template <bool kRight>
PYMOE_INLINE void pack_pairs(const BFloat16* const (&lines)[32], int64_t first, int64_t items, BFloat16* target) {
  TileRow rows[16];
  if (items == kTileItems && lines[31] != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = load_tile_pairs(lines[2 * i] + first, lines[2 * i + 1] + first);
  } else {
    const auto line = [&](int i) { return lines[i] == nullptr ? nullptr : lines[i] + first; };
    for (int i = 0; i < 16; ++i) rows[i] = load_tile_pairs(line(2 * i), line(2 * i + 1), items);
  }
  if constexpr (!kRight) transpose(rows);
  store_tile(rows, target);
}

#if PYMOE_ISA_LEVEL == 4
// Packs two right tiles of 16 items each, from 32 steps whose 32 items start at lines[p] + first.
PYMOE_INLINE void pack_two_right(const BFloat16* const (&lines)[32], int64_t first, BFloat16* target,
                                 BFloat16* second_target) {
  alignas(64) static constexpr uint16_t kOrder[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                                      16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                                      24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i low = _mm512_load_si512(kOrder), high = _mm512_load_si512(kOrder + 32);
#pragma GCC unroll 4
  for (int i = 0; i < 16; ++i) {
    const __m512i even = _mm512_loadu_si512(lines[2 * i] + first), odd = _mm512_loadu_si512(lines[2 * i + 1] + first);
    _mm512_store_si512(target + i * kTileDepth, _mm512_permutex2var_epi16(even, low, odd));
    _mm512_store_si512(second_target + i * kTileDepth, _mm512_permutex2var_epi16(even, high, odd));
  }
}
#endif

// Packs `items` items starting at `first`, and `k` steps of each starting at `p`: all tiles along k of the first 16
// items, then those of the next 16 items. With each packed tile, a part of `ahead` is prefetched.
template <bool kRight>
void pack_tiles(const TileSource& source, int64_t first, int64_t items, int64_t p, int64_t k, BFloat16* target,
                RowsAhead& ahead) {
  const int64_t depth = (k + kTileDepth - 1) / kTileDepth;
  if (source.steps != nullptr || (source.k_stride != 1 && source.item_stride == 1)) {  // iterate in the order of memory
    for (int64_t q = 0; q < k; q += kTileDepth, target += kTileElements) {
      const BFloat16* lines[kTileDepth];
      for (int64_t i = 0; i < kTileDepth; ++i) lines[i] = q + i < k ? source.at(first, p + q + i) : nullptr;
      int64_t i = 0;
#if PYMOE_ISA_LEVEL == 4
      for (; kRight && i + 2 * kTileItems <= items && lines[kTileDepth - 1] != nullptr; i += 2 * kTileItems) {
        BFloat16* const tile = target + i / kTileItems * depth * kTileElements;
        ahead.ask();
        ahead.ask();
        pack_two_right(lines, i, tile, tile + depth * kTileElements);
      }
#endif
      for (; i < items; i += kTileItems) {
        ahead.ask();
        pack_pairs<kRight>(lines, i, std::min(kTileItems, items - i), target + i / kTileItems * depth * kTileElements);
      }
    }
    return;
  }
  for (int64_t i = 0; i < items; i += kTileItems) {
    const BFloat16* lines[kTileItems];
    for (int64_t r = 0; r < kTileItems; ++r) lines[r] = i + r < items ? source.at(first + i + r, p) : nullptr;
    for (int64_t q = 0; q < k; q += kTileDepth, target += kTileElements) {
      const int64_t count = std::min(kTileDepth, k - q);
      ahead.ask();
      if (source.k_stride == 1) {
        pack_lines<kRight>(lines, q, count, target);
        continue;
      }
      BFloat16 copies[kTileItems][kTileDepth];
      const BFloat16* lines_of_copies[kTileItems];
      for (int64_t r = 0; r < kTileItems; ++r) {
        lines_of_copies[r] = lines[r] == nullptr ? nullptr : copies[r];
        for (int64_t c = 0; c < count && lines[r] != nullptr; ++c) copies[r][c] = lines[r][(q + c) * source.k_stride];
      }
      pack_lines<kRight>(lines_of_copies, 0, count, target);
    }
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
