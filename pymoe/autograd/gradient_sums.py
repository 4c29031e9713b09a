"""Sums of gradients, as autograd makes them."""

from __future__ import annotations

from torch import Tensor


def add_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Return ``one + other``. Either may be sparse, but torch adds a sparse tensor on the right of a dense one only."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
