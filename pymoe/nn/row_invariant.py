"""A linear layer whose rows do not depend on the rows around them, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import ops


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
