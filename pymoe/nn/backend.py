"""Which operators a layer calls: the caller's explicit choice, never a silent fallback."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

from pymoe import ops, reference

Backend = Literal["native", "reference"]
"""Whose operators a layer calls."""


def operators(backend: Backend) -> ModuleType:
    """The module of ``backend``: :mod:`pymoe.ops` for ``"native"``, :mod:`pymoe.reference` for ``"reference"``."""
    return ops if backend == "native" else reference
