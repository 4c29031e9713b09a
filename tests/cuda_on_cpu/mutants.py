"""Faults planted in the CUDA kernels, which the emulated tests must notice. Run by run_mutants.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` at its only place in ``file``."""

    name: str
    file: str
    old: str
    new: str
    how: str
    """What notices it: ``values`` (also the emulator's own checks), ``address`` or ``thread`` (a sanitizer)."""
    tests: str
    """The test file whose cases are run: ``dispatch`` for test_dispatch.cpp."""


DISPATCH = "csrc/kernels/dispatch_cuda.cu"
COMBINE = "csrc/kernels/combine_cuda.cu"
COMBINE_BACKWARD = "csrc/kernels/combine_backward_cuda.cu"

FAULTS = [
    Fault(
        "dispatch takes slot S",
        DISPATCH,
        "targets[k] >= in_use) continue",
        "targets[k] > in_use) continue",
        "address",
        "dispatch",
    ),
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
]
