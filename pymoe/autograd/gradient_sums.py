"""Sums of gradients, as autograd makes them."""

from __future__ import annotations

from torch import Tensor


def add_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Return ``one + other``, either of which may be sparse: torch itself adds a sparse tensor to a dense one alone."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
