"""Faults planted in the CUDA kernels, which the emulated tests must notice. Run by run_mutants.py."""

from __future__ import annotations

from fault import Fault
from routing_mutants import FAULTS as ROUTING_FAULTS

COMBINE = "csrc/kernels/combine_cuda.cu"
COMBINE_BACKWARD = "csrc/kernels/combine_backward_cuda.cu"
EXPERT_ACTIVATION = "csrc/kernels/expert_activation_cuda.cu"
ROUTER_LOSSES = "csrc/kernels/router_losses_cuda.cu"

FAULTS = [
    *ROUTING_FAULTS,
    Fault("combine takes slot S", COMBINE, "slot < rows ? slot", "slot <= rows ? slot", "address", "combine"),
    Fault(
        "combine: an offset of 32 bits",
        COMBINE,
        "y + (now.row[k] * row_packs + column) * kElements",
        "y + static_cast<int32_t>((now.row[k] * row_packs + column) * kElements)",
        "values",
        "combine",
    ),
    Fault(
        "combine forgets the choices past the sixteenth",
        COMBINE,
        "if (begin >= choices) break;",
        "if (begin >= 2 * kAtOnce || begin >= choices) break;",
        "values",
        "combine",
    ),
    Fault(
        "combine_backward takes slot S",
        COMBINE_BACKWARD,
        "row[k] = slot < rows ? slot : -1;",
        "row[k] = slot <= rows ? slot : -1;",
        "address",
        "combine",
    ),
    Fault(
        "combine_backward clears one row too few",
        COMBINE_BACKWARD,
        "if (row < used) continue;",
        "if (row <= used) continue;",
        "values",
        "combine",
    ),
    Fault(
        "combine_backward does not wait for the other warps' sums",
        COMBINE_BACKWARD,
        "      __syncthreads();\n",
        "",
        "thread",
        "combine",
    ),
    Fault(
        "combine_backward writes the next sums over those being read",
        COMBINE_BACKWARD,
        "(round % 2) * kWarps",
        "0 * kWarps",
        "thread",
        "combine",
    ),
    Fault(
        "combine_backward: threads without a token leave before the barrier",
        COMBINE_BACKWARD,
        "  const bool there = token < a.tokens;",
        "  const bool there = token < a.tokens;\n  if (!there) return;",
        "values",
        "combine",
    ),
    Fault(
        "expert_activation goes past the last row",
        EXPERT_ACTIVATION,
        "place.row < s.rows ? s.features - place.column[j] : 0",
        "s.features - place.column[j]",
        "address",
        "expert_activation",
    ),
    Fault(
        "expert_activation moves a partial chunk whole",
        EXPERT_ACTIVATION,
        "s.whole && place.count[j] == kChunk<T>",
        "s.whole && place.count[j] > 0",
        "address",
        "expert_activation",
    ),
    Fault(
        "expert_activation does not ask whether up is aligned",
        EXPERT_ACTIVATION,
        "gated ? features * static_cast<int64_t>(sizeof(T)) : 16",
        "16",
        "address",
        "expert_activation",
    ),
    Fault(
        "expert_activation: the blocks of a row take the same chunks",
        EXPERT_ACTIVATION,
        "static_cast<int64_t>(blockIdx.x % s.tiles) * share",
        "0 * share",
        "values",
        "expert_activation",
    ),
    Fault(
        "expert_activation takes the next row's first chunk as the tail",
        EXPERT_ACTIVATION,
        "max(min(rest, int64_t{kChunk<T>}), int64_t{0})",
        "rest > 0 ? kChunk<T> : 0",
        "address",
        "expert_activation",
    ),
    Fault(
        "router_losses does not wait for the tokens' values",
        ROUTER_LOSSES,
        "  __syncthreads();\n  if (threadIdx.x % kWarp == 0 && threadIdx.x < 2",
        "  if (threadIdx.x % kWarp == 0 && threadIdx.x < 2",
        "thread",
        "router_losses",
    ),
    Fault(
        "router_losses loses an addition to the sum of the load",
        ROUTER_LOSSES,
        "atomicAdd(sum, mine);",
        "*sum += mine;",
        "thread",
        "router_losses",
    ),
    Fault(
        "router_losses reads the fractions before they are there",
        ROUTER_LOSSES,
        "    __syncthreads();\n  }\n  return fraction;",
        "  }\n  return fraction;",
        "thread",
        "router_losses",
    ),
    Fault(
        "router_losses clears the sum of the load while others add",
        ROUTER_LOSSES,
        "  if (threadIdx.x == 0) *sum = 0;\n  __syncthreads();",
        "  if (threadIdx.x == 0) *sum = 0;",
        "thread",
        "router_losses",
    ),
    Fault(
        "router_losses takes a whole block of tokens at the end",
        ROUTER_LOSSES,
        "count = min(tokens - first, kLossBlock);",
        "count = kLossBlock;",
        "address",
        "router_losses",
    ),
]
