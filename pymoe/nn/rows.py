"""The rows of a layer: their layout in memory, and a product in which a row does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import ops


def as_rows(x: Tensor, hidden_size: int) -> Tensor:
    """Return the tokens of (..., H) as (T, H), one after the other in memory.

    Every way through a layer begins with this, because the rounding of torch's matrix products depends on the layout of
    their operands, even of a single row, which counts as contiguous whatever its strides are.

    Args:
        x: (..., H).
        hidden_size: H.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, hidden_size)
    return rows if rows.stride() == (hidden_size, 1) else rows.clone(memory_format=torch.contiguous_format)


def linear(x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, *, row_invariant: bool) -> Tensor:
    """Return ``F.linear(x_TH, weight, bias)``, in one of two ways.

    The matrix products of BLAS may sum a row in another order if there are more or fewer rows, and always do for a
    single row. :func:`pymoe.ops.grouped_linear` always uses the same order, so equal tokens have equal bits in every
    batch, and in every share of a batch that a rank has. The same holds for the gradient of ``x_TH``.

    Args:
        x_TH: (T, H).
        weight: (N, H).
        bias: (N,), or None.
        row_invariant: if true, ``grouped_linear`` computes the result.
    """
    if not row_invariant:
        return F.linear(x_TH, weight, bias)
    offsets = weight.new_zeros(2, dtype=torch.int32)
    offsets[1:] = x_TH.shape[0]
    return ops.grouped_linear(x_TH, weight[None], offsets, None if bias is None else bias[None])
