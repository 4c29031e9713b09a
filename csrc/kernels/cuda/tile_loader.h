// Moves operands of a tiled matrix product on the CUDA cores from memory to shared memory.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/mma.h"
#include "kernels/cuda/pack.h"

namespace pymoe::cuda {

// The positions of the rows or the depths of an operand in memory: consecutive, or given by an order. Values of an
// order always count from the operand's original start, even for a tile that begins at a later element of the order.
struct InSequence {
  static constexpr bool kGiven = false;
  PYMOE_DEVICE int64_t operator()(int64_t i) const { return i; }
  PYMOE_DEVICE InSequence from(int64_t) const { return {}; }
  PYMOE_DEVICE int64_t moves(int64_t i) const { return i; }  // how far a pointer moves for element i
};
struct ByOrder {
  static constexpr bool kGiven = true;
  const int32_t* order;
  int64_t count;
  // Returns the position of element i; a negative number if it has none.
  PYMOE_DEVICE int64_t operator()(int64_t i) const {
    const int64_t place = order[i];
    return place < count ? place : -1;
  }
  PYMOE_DEVICE ByOrder from(int64_t i) const { return {order + i, count}; }
  PYMOE_DEVICE int64_t moves(int64_t) const { return 0; }
};

// One operand: element (row, depth) is data[row * row_stride + depth * depth_stride]. The product sums over the depth.
// `places` gives the positions of the rows, or of the depths if packs run along rows.
template <typename T, typename Places = InSequence>
struct Operand {
  const T* data;
  int64_t row_stride;
  int64_t depth_stride;
  bool along_rows;  // true if packs hold elements of neighbouring rows, not of neighbouring depths
  bool whole;       // true if a pack is one aligned access, and its elements exist all or none
  Places places;

  // Makes the operand begin at its i-th row or depth, whichever `places` describes; `stride` is the distance in
  // elements between consecutive rows or depths.
  PYMOE_DEVICE void begin_at(int64_t i, int64_t stride) {
    data += places.moves(i) * stride;
    places = places.from(i);
  }
};

// The direction in which a block of the operand may start at any index. In the other direction, blocks start at
// multiples of a tile.
enum class Cut : int8_t { kNone, kRows, kDepth };

// Returns the operand for the `rows` x `depth` matrix at `data`, and for the other matrices at multiples of `jump`
// elements from there. Blocks may start at any index along `cut`. So packs along `cut` are never `whole`; packs in the
// other direction may be, whatever the size along `cut`. If `places` gives an order, it is the order of the rows or
// depths along `cut`, and elements must be contiguous in the other direction.
template <typename T, typename Places = InSequence>
Operand<T, Places> operand(const void* data, int64_t row_stride, int64_t depth_stride, int64_t rows, int64_t depth,
                           Cut cut, int64_t jump = 0, const Places& places = {}) {
  const bool along_rows = Places::kGiven ? cut == Cut::kDepth : row_stride == 1 && depth_stride != 1;
  const bool neighbours = along_rows || depth_stride == 1;
  const bool cut_in_packs = cut == (along_rows ? Cut::kRows : Cut::kDepth);
  const int64_t steps = (along_rows ? depth_stride | rows : row_stride | depth) | jump;
  const bool aligned = widest_access({data}, steps * static_cast<int64_t>(sizeof(T))) == 16;
  return {static_cast<const T*>(data),
          row_stride,
          depth_stride,
          along_rows,
          neighbours && !cut_in_packs && aligned,
          places};
}

// The layout of a tile in shared memory: element (row, depth) is at index row * row_step + depth * depth_step.
struct TileLayout {
  int row_step;
  int depth_step;
};

// Loads kRows rows and 64 bytes of depth at a time. Whole packs wait in registers while the previous tile is
// multiplied; other packs are read element by element. Elements outside of the operand are zero and not read.
template <typename T, int kRows, int kThreads, typename Places>
struct TileLoader {
  static constexpr int kPack = 16 / static_cast<int>(sizeof(T)), kDepth = 4 * kPack;
  static constexpr int kPacks = kRows * 4 / kThreads;  // per thread
  static_assert(kPacks * kThreads == kRows * 4);

  uint4 packs[kPacks];       // still packed: unpacking would wait for the loads
  const T* from;             // the thread's first pack of the next tile; with an order, as if at position 0
  int64_t pack_step;         // distance in memory between a thread's packs; with an order, between positions
  int64_t tile_step;         // distance to the next tile
  int64_t element_step;      // distance from element to element of a pack
  int row, depth;            // position of the thread's first pack in a tile
  int row_step, depth_step;  // distance in the tile to the thread's next pack
  int rows;                  // of the operand
  bool along_rows, whole;
  Places places;  // positions of the thread's packs; the first is number 0

  PYMOE_DEVICE TileLoader(const Operand<T, Places>& operand, int rows_there)
      : tile_step(kDepth * operand.depth_stride),
        element_step(operand.along_rows ? operand.row_stride : operand.depth_stride),
        rows(rows_there),
        along_rows(operand.along_rows),
        whole(operand.whole),
        places(operand.places) {
    const int thread = static_cast<int>(threadIdx.x);
    if (along_rows) {
      constexpr int kAcross = kRows / kPack;  // number of packs in one depth
      row = thread % kAcross * kPack;
      depth = thread / kAcross;
      row_step = 0;
      depth_step = kThreads / kAcross;
    } else {
      // Four threads take the 64 bytes of a row. Eight consecutive threads take rows r and r + 4.
      const int quad = thread / 4;
      row = (quad & ~7) | (quad & 1) << 2 | (quad & 7) >> 1;
      depth = thread % 4 * kPack;
      row_step = kThreads / 4;
      depth_step = 0;
    }
    if constexpr (Places::kGiven) {
      places = places.from(along_rows ? depth : row);
      from = operand.data + (along_rows ? row : depth);
      pack_step = along_rows ? operand.depth_stride : operand.row_stride;
    } else {
      from = operand.data + row * operand.row_stride + depth * operand.depth_stride;
      pack_step = row_step * operand.row_stride + depth_step * operand.depth_stride;
    }
  }

  // Returns the address of the thread's pack i of the next tile; null if the order has no element there.
  PYMOE_DEVICE const T* pack_at(int i) const {
    if constexpr (Places::kGiven) {
      const int64_t place = places(i * (row_step + depth_step));
      return place < 0 ? nullptr : from + place * pack_step;
    } else {
      return from + i * pack_step;
    }
  }

  PYMOE_DEVICE void advance() {
    if constexpr (Places::kGiven) {
      if (along_rows) {
        places = places.from(kDepth);
        return;
      }
    }
    from += tile_step;
  }

  // Reads the next tile, if it consists of whole packs; store() reads other tiles. `left`: the number of depths of the
  // operand from this tile on.
  PYMOE_DEVICE void fetch(int64_t left) {
    if (!whole) return;
    const int rows_left = rows - row, depths_left = (left < kDepth ? static_cast<int>(left) : kDepth) - depth;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const bool inside = i * row_step < rows_left && i * depth_step < depths_left;
      packs[i] = uint4{};
      if (!inside) continue;
      const T* const at = pack_at(i);
      if (!Places::kGiven || at != nullptr) packs[i] = *reinterpret_cast<const uint4*>(at);
    }
    advance();
  }

  // Writes the next tile to shared memory. If packs are whole, fetch() has already read the tile into registers;
  // otherwise, it is read here, element by element. `left`: as for fetch.
  PYMOE_DEVICE void store(T* tile, TileLayout layout, int64_t left) {
    T* to = tile + row * layout.row_step + depth * layout.depth_step;
    const int shared_step = row_step * layout.row_step + depth_step * layout.depth_step;
    const int element = along_rows ? layout.row_step : layout.depth_step;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (along_rows) {
          store_16_bytes(to + i * shared_step, packs[i]);
        } else {
          const auto elements = bit_cast<Pack<T, kPack>>(packs[i]);
#pragma unroll
          for (int j = 0; j < kPack; ++j) to[i * shared_step + j * element] = elements[j];
        }
      }
      return;
    }
    const int rows_left = rows - row, depths_left = (left < kDepth ? static_cast<int>(left) : kDepth) - depth;
#pragma unroll 1
    for (int i = 0; i < kPacks; ++i) {
      const T* at = nullptr;
      if (!Places::kGiven || (i * row_step < rows_left && i * depth_step < depths_left)) at = pack_at(i);
#pragma unroll 4
      for (int j = 0; j < kPack; ++j) {
        const bool inside = i * row_step + (along_rows ? j : 0) < rows_left &&
                            i * depth_step + (along_rows ? 0 : j) < depths_left && (!Places::kGiven || at != nullptr);
        to[i * shared_step + j * element] = inside ? at[j * element_step] : T{};
      }
    }
    advance();
  }
};

}  // namespace pymoe::cuda
