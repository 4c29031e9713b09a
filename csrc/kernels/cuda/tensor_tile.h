// A block's part of a matrix product on the tensor cores: c = a * b^T for kRows rows of a and 128 rows of b, which are
// the columns of c, of 16-bit floats with sums in fp32. Every sum runs over the depth in order, 16 depths per
// instruction, for any size of the tile and any position in c.
//
// In each step, cp.async (or plain stores, if packs are not whole) brings 32 depths of both operands to one of three
// stages in shared memory, two steps before they are multiplied: with 128 rows, 32 KiB are in flight per block. One
// barrier per step ensures that a stage has arrived, and that the stage to be filled next has been read. Each of four
// warps computes half of the rows and half of the columns, 64 x 64 if there are 128 rows: ldmatrix then reads 32 KiB
// per step, while eight warps of 64 x 32 would read 48.
//
// A tile consists of lines of 16-byte packs: a line is a row of 4 packs along the depth, or a depth with packs along
// the rows, depending on which elements are neighbours in memory. place() permutes the packs of each line, so that no
// padding is needed to avoid bank conflicts: neither when ldmatrix reads a pack from each of eight lines, nor when
// cp.async writes eight packs together.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/async_copy.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.h"
#include "kernels/cuda/pack.h"

namespace pymoe::cuda {

inline constexpr int kTensorThreads = 128, kTensorColumns = 128;
inline constexpr int kStepDepth = 32, kStages = 3;
inline constexpr int kTensorPack = 8;  // elements
template <int kTileRows>
inline constexpr int kTensorBlocks = kTileRows == 128 ? 2 : 3;  // number of blocks that share a multiprocessor

// One operand. Its lines are its rows if packs run along the depth, otherwise its depths; element i of a line is at
// element_stride * i. An order gives the position of line i; -1, or any value of at least `count`, means that the
// line does not exist.
template <typename T>
struct TensorOperand {
  const T* data;
  int64_t line_stride;
  int64_t element_stride;
  bool whole;            // true if lines are contiguous and aligned to packs
  const int32_t* order;  // or null
  int64_t count;

  // Moves the start of the operand to its i-th line.
  PYMOE_DEVICE void begin_at(int64_t i) {
    if (order != nullptr) {
      order += i;
    } else {
      data += i * line_stride;
    }
  }
};

// Returns the operand at `data`. If each expert has a matrix there, `jump` is the distance in elements from one matrix
// to the next. Packs count as aligned only if those of all matrices and lines are.
template <typename T>
TensorOperand<T> tensor_operand(const void* data, int64_t line_stride, int64_t element_stride, int64_t jump = 0,
                                const int32_t* order = nullptr, int64_t count = 0) {
  const bool aligned = widest_access({data}, (line_stride | jump) * static_cast<int64_t>(sizeof(T))) == 16;
  return {static_cast<const T*>(data), line_stride, element_stride, element_stride == 1 && aligned, order, count};
}

// The positions in shared memory of the packs of a tile, which has kRows rows and kStepDepth depths.
template <int kRows, bool kAlongRows>
struct TensorLayout {
  static constexpr int kAcross = kAlongRows ? kRows / kTensorPack : kStepDepth / kTensorPack;  // packs of a line
  static constexpr int kPacks = kRows * kStepDepth / kTensorPack;
  static constexpr int kElements = kRows * kStepDepth;

  // Returns the value that is XORed with the index of a pack in the given line. Because of it, packs with the same
  // index in eight lines are in different banks, and so are eight consecutive packs.
  static PYMOE_DEVICE int exchange(int line) { return kAlongRows ? line % 8 : line / 2 % 4; }
  static PYMOE_DEVICE int place(int line, int across) { return line * kAcross + (across ^ exchange(line)); }
};

// Loads the tiles of an operand one after the other into shared memory. Elements outside of the operand are zero and
// not read.
template <typename T, int kRows, bool kAlongRows>
class TensorLoader {
  using Layout = TensorLayout<kRows, kAlongRows>;
  static constexpr int kMine = Layout::kPacks / kTensorThreads;    // packs per thread
  static constexpr int kApart = kTensorThreads / Layout::kAcross;  // distance in lines from one pack to the next
  static constexpr int kPlacesApart = Layout::kAcross * kApart * kTensorPack;
  static_assert(kMine * kTensorThreads == Layout::kPacks && kApart % 8 == 0);  // exchange() is the same for all of them

 public:
  // `rows`: the number of rows of the operand in this tile.
  PYMOE_DEVICE TensorLoader(const TensorOperand<T>& operand, int rows)
      : operand_(operand),
        rows_(rows),
        line_(static_cast<int>(threadIdx.x) / Layout::kAcross),
        across_(static_cast<int>(threadIdx.x) % Layout::kAcross * kTensorPack),
        place_(Layout::place(line_, static_cast<int>(threadIdx.x) % Layout::kAcross) * kTensorPack) {
    operand_.data += across_ * operand.element_stride;
    if constexpr (!kAlongRows) {
      there_ = 0;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int64_t at = place_of(line_ + i * kApart, rows);
        if (at >= 0) there_ |= 1 << i;
        from_[i] = operand_.data + (at >= 0 ? at : 0) * operand.line_stride;
      }
    }
  }

  // Begins to load the next tile. `left`: the number of depths of the operand from this tile on.
  PYMOE_DEVICE void fetch(T* tile, int64_t left) {
    const int depths = left < kStepDepth ? static_cast<int>(left) : kStepDepth;
    if (operand_.whole) {
      fetch_packs(tile + place_, depths);
    } else {
      fetch_elements(tile + place_, depths);
    }
    if constexpr (kAlongRows) {
      operand_.begin_at(kStepDepth);
    } else {
      operand_.data += kStepDepth * operand_.element_stride;
    }
  }

 private:
  PYMOE_DEVICE void fetch_packs(T* to, int depths) {
    if constexpr (kAlongRows) {
      const int bytes = bytes_of(rows_ - across_);
      if (operand_.order == nullptr) {
        const T* const first = operand_.data + line_ * operand_.line_stride;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          const bool inside = line_ + i * kApart < depths;
          copy_async(to + i * kPlacesApart, first + i * kApart * operand_.line_stride, inside ? bytes : 0);
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int64_t at = place_of(line_ + i * kApart, depths);
        const T* const from = operand_.data + (at >= 0 ? at : 0) * operand_.line_stride;
        copy_async(to + i * kPlacesApart, from, at >= 0 ? bytes : 0);
      }
    } else {
      const int bytes = bytes_of(depths - across_);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        copy_async(to + i * kPlacesApart, from_[i], (there_ >> i & 1) != 0 ? bytes : 0);
        from_[i] += kStepDepth;
      }
    }
  }

  // Does the same as fetch, for packs that cannot be loaded by single accesses. The barrier before copies are read also
  // covers these stores.
  PYMOE_DEVICE void fetch_elements(T* to, int depths) {
    const int lines = kAlongRows ? depths : rows_, elements = kAlongRows ? rows_ : depths;
#pragma unroll 1
    for (int i = 0; i < kMine; ++i) {
      const int64_t at = place_of(line_ + i * kApart, lines);
#pragma unroll 4
      for (int j = 0; j < kTensorPack; ++j) {
        const bool inside = at >= 0 && across_ + j < elements;
        to[i * kPlacesApart + j] =
            inside ? operand_.data[at * operand_.line_stride + j * operand_.element_stride] : T{};
      }
    }
  }

  static PYMOE_DEVICE int bytes_of(int elements) {
    return (elements < 0 ? 0 : elements < kTensorPack ? elements : kTensorPack) * static_cast<int>(sizeof(T));
  }

  // Returns the position of the given line of the tile, counted from the operand's start; -1 if the line does not
  // exist. The tile has `lines` lines.
  PYMOE_DEVICE int64_t place_of(int line, int lines) const {
    if (line >= lines) return -1;
    if (operand_.order == nullptr) return line;
    const int64_t place = operand_.order[line];
    return place < operand_.count ? place : -1;
  }

  TensorOperand<T> operand_;  // begins at the next tile's first line, with the thread's first element there
  int rows_;
  int line_, across_;  // the thread's first pack: its line, and the number of its first element there
  int place_;          // the place of that element
  // If lines are rows: the addresses of the thread's packs in the next tile, and a bit per pack that is set if its row
  // exists.
  const T* from_[kMine];
  int there_;
};

// Where this lane reads in the 16 x 16 blocks of a tile, for the rows from `first_row` on (a multiple of 32, or of 64
// if the warp has 64 rows). The four quarters of a block come in the order of the instruction's registers: in `a`,
// upper rows vary faster than depths; in `b`, depths vary faster than columns. (With any other order the compiler would
// reorder them, by a move for every register.)
template <int kRows, bool kAlongRows, bool kIsB>
class TensorBlocks {
  using Layout = TensorLayout<kRows, kAlongRows>;

 public:
  explicit PYMOE_DEVICE TensorBlocks(int first_row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int late_row = kIsB ? lane / 16 : lane / 8 % 2, late_depth = kIsB ? lane / 8 % 2 : lane / 16;
    if constexpr (kAlongRows) {
      const int depth = lane % 8 + 8 * late_depth;
      line_ = depth * Layout::kAcross + first_row / 64 * 8;
      across_ = (first_row / 8 % 8 + late_row) ^ Layout::exchange(depth);
    } else {
      const int row = first_row + lane % 8 + 8 * late_row;
      line_ = row * Layout::kAcross;
      across_ = late_depth ^ Layout::exchange(row);
    }
  }

  // Loads block (i, k): 16 rows from 16 i on, and 16 depths from 16 k on.
  template <typename T>
  PYMOE_DEVICE void load(uint32_t (&to)[4], const T* tile, int i, int k) const {
    if constexpr (kAlongRows) {
      load_matrices_transposed(to, tile, (line_ + k * 16 * Layout::kAcross + (across_ ^ 2 * i)) * kTensorPack);
    } else {
      load_matrices(to, tile, (line_ + i * 16 * Layout::kAcross + (across_ ^ 2 * k)) * kTensorPack);
    }
  }

 private:
  int line_, across_;  // in packs
};

template <typename T, int kTileRows, bool kAAlongRows, bool kBAlongRows>
class TensorTile {
  using ALayout = TensorLayout<kTileRows, kAAlongRows>;
  using BLayout = TensorLayout<kTensorColumns, kBAlongRows>;
  static constexpr int kStage = ALayout::kElements + BLayout::kElements;
  static constexpr int kARows = kTileRows / 2, kBRows = kTensorColumns / 2;  // of a warp
  static constexpr int kABlocks = kARows / 16, kBBlocks = kBRows / 16;

 public:
  static constexpr int kSharedPacks = kStages * kStage / kTensorPack;

  PYMOE_DEVICE TensorTile() {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    row_ = warp / 2 * kARows;
    column_ = warp % 2 * kBRows;
  }

  // Computes the tile. `shared` must have room for kSharedPacks packs. All threads of the block must call this.
  PYMOE_DEVICE void run(const TensorOperand<T>& a, const TensorOperand<T>& b, int rows, int columns, int64_t depth,
                        T* shared) {
    TensorLoader<T, kTileRows, kAAlongRows> a_loader(a, rows);
    TensorLoader<T, kTensorColumns, kBAlongRows> b_loader(b, columns);
    const TensorBlocks<kTileRows, kAAlongRows, false> a_blocks(row_);
    const TensorBlocks<kTensorColumns, kBAlongRows, true> b_blocks(column_);
    const bool idle = row_ >= rows || column_ >= columns;  // uniform within a warp
    int64_t unfetched = depth;
    const auto fetch = [&](int stage) {
      if (unfetched > 0) {
        a_loader.fetch(shared + stage * kStage, unfetched);
        b_loader.fetch(shared + stage * kStage + ALayout::kElements, unfetched);
      }
      commit_copies();  // one group per step, so that counting groups counts steps
      unfetched -= kStepDepth;
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);
    int stage = 0, free = kStages - 1;
    for (int64_t left = depth; left > 0; left -= kStepDepth) {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      fetch(free);
      if (!idle) multiply(a_blocks, b_blocks, shared + stage * kStage);
      free = stage;
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
  }

  // Writes c: row i goes to row places(i) of `to`, or nowhere if places(i) is negative. Rows of `to` are `pitch`
  // elements apart; `in_packs` says that they begin at multiples of 16 bytes. If there is a bias, bias[i * bias_step]
  // is added to column i. All lanes of a warp must call this together.
  template <typename Places>
  PYMOE_DEVICE void write(T* to, int64_t pitch, int rows, int columns, bool in_packs, const Places& places,
                          const T* bias = nullptr, int64_t bias_step = 0) const {
    if (row_ >= rows || column_ >= columns) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, in_quad = lane % 4;
#pragma unroll
    for (int quarter = 0; quarter < kBBlocks / 2; ++quarter) {
      float biases[4][2] = {};
      if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = column_ + 32 * quarter + 8 * (j / 2) + 2 * in_quad + j % 2;
          if (column < columns) biases[j / 2][j % 2] = to_accumulate(bias[column * bias_step]);
        }
      }
#pragma unroll
      for (int half_block = 0; half_block < 2 * kABlocks; ++half_block) {
        const int i = half_block / 2, half = half_block % 2;
        uint32_t pairs[4];  // four blocks of eight columns; the lane has two columns of each
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const sums = sum_[i][4 * quarter + j] + 2 * half;
          const float with_bias[2] = {sums[0] + biases[j][0], sums[1] + biases[j][1]};
          pairs[j] = bit_cast<uint32_t>(narrow<T, 2>(with_bias));
        }
        transpose_in_quad(pairs, in_quad);  // now a lane has eight columns, and its quad 64 bytes of a row
        const int row = row_ + 8 * half_block + lane / 4, column = column_ + 32 * quarter + 8 * in_quad;
        const int64_t place = row < rows ? places(row) : -1;
        if (place < 0) continue;
        T* const run = to + place * pitch + column;
        const uint4 values{pairs[0], pairs[1], pairs[2], pairs[3]};
        if (in_packs && column + kTensorPack <= columns) {
          __stcg(reinterpret_cast<uint4*>(run), values);
        } else {
          const auto elements = bit_cast<Pack<T, kTensorPack>>(values);
#pragma unroll
          for (int j = 0; j < kTensorPack; ++j) {
            if (column + j < columns) run[j] = elements[j];
          }
        }
      }
    }
  }

 private:
  template <typename ABlocks, typename BBlocks>
  PYMOE_DEVICE void multiply(const ABlocks& a_blocks, const BBlocks& b_blocks, const T* tile) {
#pragma unroll
    for (int k = 0; k < kStepDepth / 16; ++k) {
      uint32_t a_block[kABlocks][4];
#pragma unroll
      for (int i = 0; i < kABlocks; ++i) a_blocks.load(a_block[i], tile, i, k);
#pragma unroll
      for (int j = 0; j < kBBlocks; ++j) {
        uint32_t b_block[4];
        b_blocks.load(b_block, tile + ALayout::kElements, j, k);
#pragma unroll
        for (int i = 0; i < kABlocks; ++i) {
          multiply_add(TypeTag<T>{}, sum_[i][2 * j], a_block[i], b_block[0], b_block[1]);
          multiply_add(TypeTag<T>{}, sum_[i][2 * j + 1], a_block[i], b_block[2], b_block[3]);
        }
      }
    }
  }

  // Transposes within a quad: word j of lane i goes to word i of lane j.
  static PYMOE_DEVICE void transpose_in_quad(uint32_t (&words)[4], int in_quad) {
    const bool upper = (in_quad & 2) != 0, odd = (in_quad & 1) != 0;
    const auto swap = [&](bool second, uint32_t& first_word, uint32_t& second_word, int distance) {
      const uint32_t got = __shfl_xor_sync(kFullWarp, second ? first_word : second_word, distance);
      first_word = second ? got : first_word;
      second_word = second ? second_word : got;
    };
    swap(upper, words[0], words[2], 2);
    swap(upper, words[1], words[3], 2);
    swap(odd, words[0], words[1], 1);
    swap(odd, words[2], words[3], 1);
  }

  float sum_[kABlocks][2 * kBBlocks][4] = {};
  int row_, column_;  // first row and column of the warp's part
};

}  // namespace pymoe::cuda
