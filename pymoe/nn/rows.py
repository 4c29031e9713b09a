"""The rows of a layer: how they lie in memory, and a product in which they do not depend on the rows around them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import ops


def as_rows(x: Tensor, hidden_size: int) -> Tensor:
    """Return the tokens of (..., H) as (T, H), one after the other in memory.

    Every way through a layer begins with this. Matrix products of torch round as the layout of their operands says,
    also that of a single row, which counts as contiguous whatever its strides are.

    Args:
        x: (..., H).
        hidden_size: H.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, hidden_size)
    return rows if rows.stride() == (hidden_size, 1) else rows.clone(memory_format=torch.contiguous_format)


def linear(x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, *, row_invariant: bool) -> Tensor:
    """Return ``F.linear(x_TH, weight, bias)``, in one of two ways.

    The matrix products of BLAS may sum a row in another order where there are more or fewer rows: always for one row
    alone. Those of :func:`pymoe.ops.grouped_linear` do not, so equal tokens have equal bits in every batch, and in
    every share of a batch that a rank has. The gradient of ``x_TH`` keeps that promise, too.

    Args:
        x_TH: (T, H).
        weight: (N, H).
        bias: (N,), or None.
        row_invariant: whether ``grouped_linear`` computes it.
    """
    if not row_invariant:
        return F.linear(x_TH, weight, bias)
    offsets = weight.new_zeros(2, dtype=torch.int32)
    offsets[1:] = x_TH.shape[0]
    return ops.grouped_linear(x_TH, weight[None], offsets, None if bias is None else bias[None])
