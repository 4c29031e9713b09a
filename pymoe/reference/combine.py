"""combine: sums the experts' rows of each token with weights, which gives one row per token again."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe._common.contracts import check_combine
from pymoe._common.dtypes import accumulate_dtype
from pymoe._common.types import Routing
from pymoe.reference.fixed_steps import spread


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sum the rows of every token's choices, weighted if ``weights`` are given.

    ``out[t] = sum over k of weights[t, k] * y[routing.slot[t, k]]``. The sum starts from +0 and runs over k in order,
    in float32 (float64 for float64), with product and addition rounded separately; at the end it is rounded once to the
    dtype of ``y``. The result is exact in this sense: the same on every device and for every number of threads. A
    dropped choice adds nothing, whatever its weight.

    Args:
        y: (S, H), S = ``len(routing.token)``, any floating dtype; rows past ``routing.offsets[-1]`` are never read.
        routing: from :func:`build_routing`, or made by hand: ``slot`` names each row at most once.
        weights: (T, K), usually float32 as :func:`gate_topk` makes them; any floating dtype that widens without loss to
            the dtype of the sum (so float64 for float64 ``y`` only). ``None`` for a plain sum.

    Returns:
        (T, H), the dtype of ``y``. Differentiable in ``y`` (the gradient of a row is its weight times the gradient
        of its token; zero past ``routing.offsets[-1]``, and unspecified where no choice owns a row before that) and in
        ``weights`` (the inner product of the token's gradient and the choice's row; zero where dropped).

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a rank, size or device does not fit.
        IndexError: a slot lies outside [-1, S).
    """
    check_combine(y, routing, weights)
    slot = routing[0]
    checks.slots_in_range("combine", routing)
    dtype = accumulate_dtype(y.dtype)
    if y.shape[0] == 0:  # clamped indices need at least one row
        y = torch.cat([y, y.new_zeros(1, y.shape[1])])
    weights_TK = None if weights is None else weights.to(dtype)
    total = torch.zeros(slot.shape[0], y.shape[1], dtype=dtype, device=y.device)
    for choice in range(slot.shape[1]):
        row = slot[:, choice]
        kept = row >= 0
        # Replace both factors of a dropped choice: in the gradients, 0 times an infinity or NaN would be NaN.
        term = torch.where(kept[:, None], y[row.clamp(min=0).long()].to(dtype), 0)
        if weights_TK is not None:
            term = spread(weights_TK[:, choice], 1, term.shape[1]) * term
        total = torch.where(kept[:, None], total + term, total)
    return total.to(y.dtype)
