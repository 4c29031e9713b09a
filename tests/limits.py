"""How long tests wait, and how much they do.

``LONG`` is for what is meant to happen at once: a guard against hanging, never a measurement. PYMOE_TEST_TIME_SCALE
stretches it where that is not enough, on an emulated processor for example.
"""

from __future__ import annotations

import os

LONG = int(300 * float(os.environ.get("PYMOE_TEST_TIME_SCALE", "1")))  # seconds

EXHAUSTIVE = os.environ.get("PYMOE_EXHAUSTIVE") == "1"
"""Whether every case is to run (``pytest --level=exhaustive``, which conftest.py turns into this variable)."""


def rounds(usual: int, exhaustive: int) -> int:
    """Return how often a test repeats what chance decides."""
    return exhaustive if EXHAUSTIVE else usual
