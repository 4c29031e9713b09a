"""Rules that apply to every contender: the verdict on results, and the order of turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference divided by the norm of ``expected``.

    The result is 0 only if all elements are equal.
    """
    if torch.equal(found, expected):
        return 0.0
    error = float((found - expected).norm() / expected.norm())
    return sys.float_info.min if error == 0 else error  # the squares of tiny differences underflow to 0


def verdict(error: float, tolerance: float) -> str:
    """Return ``"exact"`` for no error, ``"close"`` for an error within the tolerance, otherwise ``"WRONG"``."""
    return "exact" if error == 0 else "close" if error <= tolerance else "WRONG"


def from_turn(items: Sequence[Item], turn: int) -> list[Item]:
    """Return the items in the order of a round: each round begins with a different item."""
    first = turn % len(items) if items else 0
    return [*items[first:], *items[:first]]
