// The products of quantized_linear with AMX tiles, for many rows (see quantized_linear.h and cpu/amx_tiles.h; no
// include guard on purpose).
//
// All sums below are exact, so tiles give the same bits as vectors:
//
//     int8     an activation is two signed bytes, 256 * high + low. Codes are read in place, as right tiles of 64
//              inputs. Over a block of 128 inputs, the products of the high and of the low bytes have separate sums of
//              32 bits.
//     4 bits   the sum over a group of 32 inputs is below 32 * 15 * 32768 < 2^24, so it and all partial sums are exact
//              in fp32. 256 * high, low and the codes (in mxfp4 twice their values) are converted to bf16, and the
//              products of both parts are added to the same sum, in fp32. The codes of a block are laid out as right
//              tiles once for several rows.
//
// Up to 16 rows and 16 (4 bits) or 32 outputs are multiplied at a time, along one block of inputs. That makes four
// tiles of sums, which are scaled and added to y while the next four are made.
//
// `Tiles` is AmxTiles, or its replacement in the tests (tests/cpp/emulated_tiles.h).

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr int64_t kSumRows = 16, kSumOutputs = 16, kTileOfSums = kSumRows * kSumOutputs;
inline constexpr int64_t kTileRowBytes = 64;

// Prefetches the cache lines from `begin` on. Every call of ask() prefetches an equal part of them.
class LinesAhead {
 public:
  LinesAhead(const uint8_t* begin, int64_t bytes, int64_t pauses)
      : line_(reinterpret_cast<uintptr_t>(begin)), at_once_((bytes / 64 + pauses - 1) / pauses) {}
  PYMOE_INLINE void ask() {
    for (int64_t i = 0; i < at_once_; ++i, line_ += 64) __builtin_prefetch(reinterpret_cast<const char*>(line_));
  }

 private:
  uintptr_t line_;  // an address: there may be no memory after the last block
  int64_t at_once_;
};

// The codes of a block as right factors. take() selects a block; multiply() then adds the products of rows and this
// block to tiles 0 to 3.
template <WeightFormat kFormat>
struct RightCodes;

// The right factors for int8. Tiles 0 and 1 sum the products of the high and of the low bytes for 16 outputs, tiles 2
// and 3 those for the next 16.
template <>
struct RightCodes<WeightFormat::kInt8> {
  static constexpr int64_t kOutputs = 2 * kSumOutputs;
  static constexpr int64_t kRowBytes = kQuantizedTile * 4, kStepBytes = 2 * quantized_group_bytes(WeightFormat::kInt8);

  const uint8_t* begin;
  int64_t whole;  // steps of 64 inputs
  bool half;      // 32 further inputs: a copy, with zeros for missing inputs
  alignas(64) uint8_t last[kStepBytes];

  void take(const uint8_t* weight, int64_t groups) {
    begin = weight;
    whole = groups / 2;
    half = groups % 2 != 0;
    if (!half) return;
    memcpy(last, weight + whole * kStepBytes, kStepBytes / 2);
    memset(last + kStepBytes / 2, 0, kStepBytes / 2);
  }

  template <typename Tiles>
  static PYMOE_INLINE void multiply_step(Tiles& tiles, const int8_t* x, const uint8_t* codes) {
    tiles.template load<4>(x, kRoundedBytes);
    tiles.template load<6>(codes, kRowBytes);
    tiles.template multiply_bytes<0, 4, 6>();
    tiles.template load<5>(x + kRoundedInputs, kRoundedBytes);
    tiles.template multiply_bytes<1, 5, 6>();
    tiles.template load<7>(codes + kSumOutputs * 4, kRowBytes);
    tiles.template multiply_bytes<2, 4, 7>();
    tiles.template multiply_bytes<3, 5, 7>();
  }

  template <typename Tiles>
  PYMOE_INLINE void multiply(Tiles& tiles, const int8_t* x, int64_t output) const {
    for (int64_t step = 0; step < whole; ++step) {
      multiply_step(tiles, x + step * kTileRowBytes, begin + step * kStepBytes + output * 4);
    }
    if (half) multiply_step(tiles, x + whole * kTileRowBytes, last + output * 4);
  }
};

PYMOE_INLINE void store_words(uint8_t* target, vuint32 words) { memcpy(target, &words, sizeof(words)); }

// Returns the 4-bit codes in the low bits of 16-bit lanes as bf16 (in mxfp4 twice their values); ignores other bits.
#if PYMOE_ISA_LEVEL == 4
template <WeightFormat kFormat>
PYMOE_INLINE vuint32 codes_as_bf16(vuint32 codes) {
  alignas(64) static constexpr uint16_t kIntegers[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  alignas(64) static constexpr uint16_t kTwiceValues[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x0000, 0xbf80, 0xc000,
      0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0,
      0x4100, 0x4140, 0x0000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};
  const auto& values = kFormat == WeightFormat::kMxfp4 ? kTwiceValues : kIntegers;
  return (vuint32)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(values));
}
#else
template <WeightFormat kFormat>
PYMOE_INLINE vuint32 codes_as_bf16(vuint32 codes) {
  vint32 even = (vint32)(codes & 15), odd = (vint32)(codes >> 16 & 15);
  if constexpr (kFormat == WeightFormat::kMxfp4) {
    even = (twice_plus_12(even) & 0xff) - 12;
    odd = (twice_plus_12(odd) & 0xff) - 12;
  }
  return (vuint32)to_float(even) >> 16 | (vuint32)to_float(odd);
}
#endif

// The right factors for the 4-bit formats. Tile g sums the products of group g, for 16 outputs.
template <WeightFormat kFormat>
struct RightCodes {
  static constexpr int64_t kOutputs = kSumOutputs;
  static constexpr int64_t kGroupBytes = 16 * kTileRowBytes;  // of the right tile of a group

  int64_t groups;
  alignas(64) uint8_t tiles[4][kQuantizedTile / kSumOutputs][kGroupBytes];

  // Lays out the codes of `some` groups as right tiles. For every 8 inputs, a tile has the pairs (0, 2), (1, 3), (4, 6)
  // and (5, 7), because the codes in a word have this order.
  void take(const uint8_t* weight, int64_t some) {
    groups = some;
    for (int64_t g = 0; g < some; ++g) {
      const uint8_t* words = weight + g * quantized_group_bytes(kFormat) + quantized_ends_bytes(kFormat);
      for (int64_t first = 0; first < kQuantizedTile; first += kLanes<float>) {
        uint8_t* to = tiles[g][first / kSumOutputs] + first % kSumOutputs * 4;
#pragma GCC unroll 4
        for (int64_t eight = 0; eight < 4; ++eight, to += 4 * kTileRowBytes) {
          const auto word = (vuint32)load_words(words + eight * kQuantizedTile * 4 + first * 4);
          store_words(to, codes_as_bf16<kFormat>(word));
          store_words(to + kTileRowBytes, codes_as_bf16<kFormat>(word >> 8));
          store_words(to + 2 * kTileRowBytes, codes_as_bf16<kFormat>(word >> 4));
          store_words(to + 3 * kTileRowBytes, codes_as_bf16<kFormat>(word >> 12));
        }
      }
    }
  }

  // Multiplies group kGroup. With kTwo, multiplies the next group in alternation, since the products of two groups need
  // not wait for each other.
  template <int kGroup, bool kTwo, typename Tiles>
  PYMOE_INLINE void multiply_groups(Tiles& t, const int8_t* x, int64_t column) const {
    constexpr int64_t kRow = 2 * kRoundedBytes, kLow = kRoundedBytes, kStep = kTileRowBytes;
    constexpr int kNext = kTwo ? kGroup + 1 : kGroup;
    t.template load<6>(tiles[kGroup][column], kTileRowBytes);
    if constexpr (kTwo) t.template load<7>(tiles[kNext][column], kTileRowBytes);
    t.template load<4>(x + kGroup * kStep, kRow);
    t.template multiply<kGroup, 4, 6>();
    if constexpr (kTwo) {
      t.template load<5>(x + kNext * kStep, kRow);
      t.template multiply<kNext, 5, 7>();
    }
    t.template load<4>(x + kLow + kGroup * kStep, kRow);
    t.template multiply<kGroup, 4, 6>();
    if constexpr (kTwo) {
      t.template load<5>(x + kLow + kNext * kStep, kRow);
      t.template multiply<kNext, 5, 7>();
    }
  }

  template <typename Tiles>
  PYMOE_INLINE void multiply(Tiles& t, const int8_t* x, int64_t output) const {
    const int64_t column = output / kSumOutputs;
    groups > 1 ? multiply_groups<0, true>(t, x, column) : multiply_groups<0, false>(t, x, column);
    if (groups > 2) {
      groups > 3 ? multiply_groups<2, true>(t, x, column) : multiply_groups<2, false>(t, x, column);
    }
  }
};

// Four tiles of sums that have not been added to y yet.
struct WaitingSums {
  const int32_t* sums = nullptr;  // in the order of RightCodes; null if there are none
  const RoundedBlock* rounded;    // of the first row
  const uint8_t* weight;          // the block's first group in the packed tile
  const float* ends;              // its scales (int4)
  int64_t groups;
  int64_t first;  // first row to be added to y: earlier rows are done
  int64_t rows;
  int64_t output;
  float* y;  // of the first row
};

template <WeightFormat kFormat>
PYMOE_INLINE void add_to_y(const WaitingSums& w, int64_t row, int64_t output, vfloat total) {
  float* y = w.y + row * kQuantizedTile + output;
  store(y, load(y) + total * step_of<kFormat>(w.rounded[row]));
}

PYMOE_INLINE void add_sums_8(const WaitingSums& w) {
  for (int64_t j = 0; j < 2 * kSumOutputs; j += kLanes<float>) {
    const int32_t* high = w.sums + j / kSumOutputs * 2 * kTileOfSums + j % kSumOutputs;
    for (int64_t r = w.first; r < w.rows; ++r) {
      vuint32 upper, lower;
      memcpy(&upper, high + r * kSumOutputs, sizeof(upper));
      memcpy(&lower, high + kTileOfSums + r * kSumOutputs, sizeof(lower));
      add_to_y<WeightFormat::kInt8>(w, r, w.output + j, to_float((vint32)((upper << 8) + lower) - w.rounded[r].zero));
    }
  }
}

template <WeightFormat kFormat, int kGroups>
PYMOE_INLINE void add_sums_4(const WaitingSums& w) {
  for (int64_t j = 0; j < kSumOutputs; j += kLanes<float>) {
    vfloat scale[kGroups], minimum[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const float* ends = w.ends + g * kQuantizedTile;
      scale[g] = load_scales<kFormat>(w.weight + g * quantized_group_bytes(kFormat), ends, w.output + j);
      if constexpr (kFormat == WeightFormat::kInt4) minimum[g] = load(ends + SuperEnds::kMinima + w.output + j);
    }
    const auto* sums = reinterpret_cast<const float*>(w.sums) + j;
    for (int64_t r = w.first; r < w.rows; ++r) {
      vfloat total{};
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const vfloat product = load(sums + g * kTileOfSums + r * kSumOutputs) * scale[g];
        total = g == 0 ? product : total + product;  // adding zero affects only a sign of zero, which is lost in y
        if constexpr (kFormat == WeightFormat::kInt4) total = total + w.rounded[r].sums[g] * minimum[g];
      }
      add_to_y<kFormat>(w, r, w.output + j, total);
    }
  }
}

template <WeightFormat kFormat>
PYMOE_INLINE void add_sums(const WaitingSums& w) {
  if (w.sums == nullptr) return;
  if constexpr (kFormat == WeightFormat::kInt8) {
    add_sums_8(w);
  } else {
    w.groups == 4   ? add_sums_4<kFormat, 4>(w)
    : w.groups == 3 ? add_sums_4<kFormat, 3>(w)
    : w.groups == 2 ? add_sums_4<kFormat, 2>(w)
                    : add_sums_4<kFormat, 1>(w);
  }
}

// Does the same as multiply_tile of quantized_linear_cpu_body.h, with AMX tiles.
template <WeightFormat kFormat, typename T, typename Tiles>
void multiply_tile_by_tiles(const uint8_t* tile, int64_t inputs, const RoundedRows& x, const T* bias, T* out,
                            int64_t row_stride, int64_t count) {
  constexpr int64_t kChunk = 96;  // number of rows whose sums stay in the nearest caches
  constexpr int64_t kBlockGroups = kRoundedInputs / kQuantizedGroup;
  constexpr int64_t kRowBytes = rounded_bytes(integers_for_tiles(kFormat));
  const int64_t groups = quantized_groups(inputs);
  alignas(64) float y[kChunk * kQuantizedTile];
  alignas(64) int32_t sums[4 * kTileOfSums];
  RightCodes<kFormat> codes;
  SuperEnds ends[2];  // of int4: the sums of the previous block wait for its scales
  const int64_t chunks = (x.count + kChunk - 1) / kChunk;
  for (int64_t chunk = 0, row = 0; chunk < chunks; ++chunk) {
    const int64_t size = (x.count - row) / (chunks - chunk);  // as equal as possible
    const int64_t parts = (size + kSumRows - 1) / kSumRows, rows = (size + parts - 1) / parts;
    Tiles tiles(rows);
    memset(y, 0, static_cast<size_t>(size * kQuantizedTile) * sizeof(float));
    WaitingSums waiting;
    const uint8_t* weight = tile + quantized_head_bytes(kFormat);
    for (int64_t group = 0; group < groups; group += kBlockGroups) {
      SuperEnds& its_ends = ends[group / kSuperGroups % 2];
      if (kFormat == WeightFormat::kInt4 && group % kSuperGroups == 0) {
        decode_ends(tile, weight, its_ends);
        weight += quantized_super_bytes(kFormat);
      }
      const int64_t block = group / kBlockGroups;
      const int64_t some = groups - group < kBlockGroups ? groups - group : kBlockGroups;
      const int64_t bytes = some * quantized_group_bytes(kFormat);
      const bool before_super = (group + some) % kSuperGroups == 0;
      LinesAhead ahead(weight + bytes, bytes + (before_super ? quantized_super_bytes(kFormat) : 0),
                       parts * (kQuantizedTile / codes.kOutputs));
      codes.take(weight, some);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t wanted = part * rows, first = wanted + rows <= size ? wanted : size - rows;
        for (int64_t output = 0; output < kQuantizedTile; output += codes.kOutputs) {
          ahead.ask();
          tiles.template zero<0>();
          tiles.template zero<1>();
          tiles.template zero<2>();
          tiles.template zero<3>();
          codes.multiply(tiles, x.codes + block * x.codes_stride + (row + first) * kRowBytes, output);
          add_sums<kFormat>(waiting);
          tiles.template store<0>(sums, kTileRowBytes);
          tiles.template store<1>(sums + kTileOfSums, kTileRowBytes);
          tiles.template store<2>(sums + 2 * kTileOfSums, kTileRowBytes);
          tiles.template store<3>(sums + 3 * kTileOfSums, kTileRowBytes);
          waiting = {sums,
                     x.rounded + block * x.rounded_stride + row + first,
                     weight,
                     its_ends.of_group(group),
                     some,
                     wanted - first,
                     rows,
                     output,
                     y + first * kQuantizedTile};
        }
      }
      weight += bytes;
    }
    add_sums<kFormat>(waiting);
    finish<kFormat>(tile, y, size, bias, out + row * row_stride, row_stride, count);
    row += size;
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
