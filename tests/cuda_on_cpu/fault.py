"""A fault planted in a CUDA kernel."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_fault import PlantedFault


@dataclass(frozen=True)
class Fault(PlantedFault):
    """What notices it, and where."""

    how: str
    """``values`` (also the emulator's own checks), ``address`` or ``thread`` (a sanitizer)."""
    tests: str
    """The test file whose cases are run: ``dispatch`` for test_dispatch.cpp."""
