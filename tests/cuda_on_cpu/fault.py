"""What a planted fault is."""

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
