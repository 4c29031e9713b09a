"""Defines time limits of tests, their numbers of repetitions, and the instruction sets that they go through.

``LONG`` limits waits that should end immediately; it guards against hangs and measures nothing. PYMOE_TEST_TIME_SCALE
multiplies it, for example for an emulated processor.
"""

from __future__ import annotations

import os
import platform

LONG = int(300 * float(os.environ.get("PYMOE_TEST_TIME_SCALE", "1")))  # seconds

EXHAUSTIVE = os.environ.get("PYMOE_EXHAUSTIVE") == "1"
"""True if every case is to run (``pytest --level=exhaustive``, which conftest.py turns into this variable)."""


ISAS = (
    ["baseline", "dotprod", "i8mm"] if platform.machine() == "aarch64" else ["baseline", "v3", "v4", "v4_bf16", "amx"]
)
"""The instruction sets of the CPU kernels on this architecture (``PYMOE_CPU_ISA``), each a part of the next."""


def rounds(usual: int, exhaustive: int) -> int:
    """Return the number of repetitions of a randomised test: ``usual``, or ``exhaustive`` in exhaustive runs."""
    return exhaustive if EXHAUSTIVE else usual
