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

FAULTS = [
    Fault(
        "dispatch takes slot S",
        DISPATCH,
        "targets[k] >= in_use) continue",
        "targets[k] > in_use) continue",
        "address",
        "dispatch",
    ),
]
