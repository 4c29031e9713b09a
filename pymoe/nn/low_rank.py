"""Low-rank adapters of experts: they add ``scaling * rows @ down[e].T @ up[e].T`` to the product of expert e."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pymoe import ops


class LowRank(NamedTuple):
    """Describes an adapter of E linear layers (LoRA, arXiv 2106.09685)."""

    down: Tensor
    """(E, r, H), any floating dtype and strides."""
    up: Tensor
    """(E, N, r), any floating dtype and strides."""
    scaling: float


def add_adapters(y: Tensor, rows: Tensor, offsets: Tensor, adapters: Sequence[LowRank]) -> Tensor:
    """Return ``y`` plus the products of the rows with the adapters of their experts, in the dtype of the rows.

    Args:
        y: (S, N), the products of the rows with the weights of their experts.
        rows: (S, H), sorted by expert.
        offsets: (E + 1,) int32.
        adapters: adapters of the E experts.
    """
    for down, up, scaling in adapters:
        inner = ops.grouped_linear(rows, down.to(rows.dtype), offsets) * scaling
        y = y + ops.grouped_linear(inner, up.to(rows.dtype), offsets)
    return y
