"""Defines time limits of tests, and their numbers of repetitions.

``LONG`` limits waits that should end immediately; it guards against hangs and measures nothing. PYMOE_TEST_TIME_SCALE
multiplies it, for example for an emulated processor.
"""

from __future__ import annotations

import os

LONG = int(300 * float(os.environ.get("PYMOE_TEST_TIME_SCALE", "1")))  # seconds

EXHAUSTIVE = os.environ.get("PYMOE_EXHAUSTIVE") == "1"
"""True if every case is to run (``pytest --level=exhaustive``, which conftest.py turns into this variable)."""


def rounds(usual: int, exhaustive: int) -> int:
    """Return the number of repetitions of a randomised test: ``usual``, or ``exhaustive`` in exhaustive runs."""
    return exhaustive if EXHAUSTIVE else usual
