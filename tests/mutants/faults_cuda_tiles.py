"""Faults planted in grouped_linear's tiles on the tensor cores, which its emulated tests must notice.

The last ones make no value wrong, but a product slow; tests of the plan and of the tiles' layout count what they cost.
"""

from __future__ import annotations

from planting import CudaFault as Fault

TENSOR_TILE = "csrc/kernels/cuda/tensor_tile.h"
GROUP_PLAN = "csrc/kernels/cuda/group_plan.h"
GROUPED_LINEAR = "csrc/kernels/grouped_linear_cuda.cu"

FAULTS = [
    Fault(name, file, old, new, how, "grouped_linear")
    for name, file, old, new, how in [
        (
            "tiles: one group of copies too few is waited for",
            TENSOR_TILE,
            "wait_for_copies<kStages - 2>();",
            "wait_for_copies<kStages - 1>();",
            "values",
        ),
        (
            "tiles: a step begins before other threads' copies have come",
            TENSOR_TILE,
            "      __syncthreads();\n",
            "",
            "thread",
        ),
        (
            "tiles: a stage is filled while other warps still read it",
            TENSOR_TILE,
            "      __syncthreads();\n      fetch(free);",
            "      fetch(free);\n      __syncthreads();",
            "thread",
        ),
        ("tiles: the stage that is filled is the one after", TENSOR_TILE, "free = stage;", "free = 0;", "values"),
        (
            "tiles: steps without copies make no group",
            TENSOR_TILE,
            "      commit_copies();",
            "      if (unfetched > 0) commit_copies();",
            "values",
        ),
        (
            "tiles: warps without rows leave before the barrier",
            TENSOR_TILE,
            "    int64_t unfetched = depth;",
            "    if (idle) return;\n    int64_t unfetched = depth;",
            "values",
        ),
        (
            "tiles: the last pack of a line is brought whole",
            TENSOR_TILE,
            "elements < kTensorPack ? elements : kTensorPack)",
            "kTensorPack)",
            "address",
        ),
        (
            "tiles: the end of a line is not zero",
            TENSOR_TILE,
            "inside ? operand_.data[at * operand_.line_stride + j * operand_.element_stride] : T{}",
            "at >= 0 ? operand_.data[at * operand_.line_stride + j * operand_.element_stride] : T{}",
            "address",
        ),
        (
            "tiles: the next expert's rows go into a weight's gradient",
            TENSOR_TILE,
            "const bool inside = line_ + i * kApart < depths;",
            "const bool inside = true;",
            "values",
        ),
        (
            "tiles: a row past the last one is brought",
            TENSOR_TILE,
            "if (line >= lines) return -1;",
            "if (line > lines) return -1;",
            "address",
        ),
        (
            "tiles: an offset of 32 bits",
            TENSOR_TILE,
            "data += i * line_stride;",
            "data += static_cast<int32_t>(i * line_stride);",
            "values",
        ),
        (
            "tiles: an order is trusted",
            TENSOR_TILE,
            "return place < operand_.count ? place : -1;",
            "return place;",
            "address",
        ),
        (
            "tiles: an order of 32 depths is read again and again",
            TENSOR_TILE,
            "      order += i;",
            "      order += 0 * i;",
            "values",
        ),
        (
            "tiles: packs are read from where none were put, in rows",
            TENSOR_TILE,
            "across_ = late_depth ^ Layout::exchange(row);",
            "across_ = late_depth ^ Layout::exchange(row + 2);",
            "values",
        ),
        (
            "tiles: packs are read from where none were put, in depths",
            TENSOR_TILE,
            "(across_ ^ 2 * i)",
            "(across_ + 2 * i) % 8",
            "values",
        ),
        (
            "tiles: b's quarters come in a's order",
            TENSOR_TILE,
            "late_row = kIsB ? lane / 16 : lane / 8 % 2",
            "late_row = lane / 8 % 2",
            "values",
        ),
        (
            "tiles: a block of b is taken for its neighbour",
            TENSOR_TILE,
            "a_block[i], b_block[0], b_block[1]",
            "a_block[i], b_block[0], b_block[2]",
            "values",
        ),
        (
            "tiles: the words of a quad are exchanged by halves alone",
            TENSOR_TILE,
            "    swap(odd, words[2], words[3], 1);\n",
            "",
            "values",
        ),
        (
            "tiles: a run is stored past the last column",
            TENSOR_TILE,
            "in_packs && column + kTensorPack <= columns",
            "in_packs",
            "address",
        ),
        (
            "tiles: a row past the last one is stored",
            TENSOR_TILE,
            "row < rows ? places(row) : -1",
            "row <= rows ? places(row) : -1",
            "address",
        ),
        (
            "tiles: the last band is as high as the others",
            GROUP_PLAN,
            "band < own && own - band < kBand ? own - band : kBand",
            "kBand",
            "values",
        ),
        (
            "tiles: the plan counts other rows than the tiles have",
            GROUPED_LINEAR,
            "a.rows < kMostRows ? a.rows : kMostRows, tile_rows_of(a)",
            "a.rows < kMostRows ? a.rows : kMostRows, kTileRows",
            "values",
        ),
    ]
]
FAULTS += [
    Fault(
        "tiles: eight packs that lanes read together are in one bank",
        TENSOR_TILE,
        "return kAlongRows ? line % 8 : line / 2 % 4;",
        "return 0;",
        "values",
        "tensor_tile",
    ),
    Fault(
        "tiles: two of eight packs that lanes read together are in one bank",
        TENSOR_TILE,
        "line / 2 % 4;",
        "line % 4;",
        "values",
        "tensor_tile",
    ),
    Fault(
        "tiles: blocks that run together read as many tiles of the weight as there are columns",
        GROUP_PLAN,
        "inline constexpr unsigned kBand = 8;",
        "inline constexpr unsigned kBand = 1;",
        "values",
        "group_plan",
    ),
]
