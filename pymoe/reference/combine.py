"""combine: sums the experts' rows of each token with weights, which gives one row per token again."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe._common.contracts import check_combine, check_offsets
from pymoe._common.types import Routing, accumulate_dtype
from pymoe.reference.expert_activation import bias_rows
from pymoe.reference.fixed_steps import spread


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Sum the rows of every token's choices, weighted if ``weights`` are given.

    ``out[t] = sum over k of weights[t, k] * y[routing.slot[t, k]]``. The sum starts from +0 and runs over k in order,
    in float32 (float64 for float64), with product and addition rounded separately; at the end it is rounded once to the
    dtype of ``y``. The result is exact in this sense: the same on every device and for every number of threads. A
    dropped choice adds nothing, whatever its weight.

    With ``bias``, each row s has the bias of its expert added first, in the dtype of the sum over k: ``y[s] + bias[e]``
    takes the place of ``y[s]``, where ``routing.offsets[e] <= s < routing.offsets[e + 1]``. Pass it if ``y`` was
    computed without the bias.

    Args:
        y: (S, H), S = ``len(routing.token)``, any floating dtype; rows past ``routing.offsets[-1]`` are never read.
        routing: from :func:`build_routing`, or made by hand: ``slot`` names only rows before ``offsets[-1]``, each at
            most once.
        weights: (T, K), usually float32 as :func:`gate_topk` makes them; any floating dtype that widens without loss to
            the dtype of the sum (so float64 for float64 ``y`` only). ``None`` for a plain sum.
        bias: (E, H), the dtype of ``y``, or None.

    Returns:
        (T, H), the dtype of ``y``. Differentiable in ``y`` (the gradient of a row is its weight times the gradient
        of its token; zero past ``routing.offsets[-1]``, and unspecified where no choice owns a row before that), in
        ``weights`` (the inner product of the token's gradient and the choice's row, which includes the bias; zero where
        dropped) and in ``bias`` (the sum of the gradient of ``y`` over the rows of the expert; unspecified if no choice
        owns one of these rows).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size or device does not fit; or there is a bias, and ``routing.offsets`` does not start at 0
            or decreases.
        IndexError: a slot lies outside [-1, S); or there is a bias, and ``routing.offsets`` ends past S.

    Example:
        >>> x, experts = torch.tensor([[1.0], [10.0]]), torch.tensor([[2, 0], [0, 1]], dtype=torch.int32)
        >>> routing = pymoe.ops.build_routing(experts, 3)
        >>> rows = pymoe.ops.dispatch(x, routing)  # experts that change nothing
        >>> pymoe.ops.combine(rows, routing, weights=torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
        tensor([[ 1.],
                [10.]])
    """
    check_combine(y, routing, weights, bias)
    slot, _, offsets = routing
    checks.slots_in_range("combine", routing)
    if bias is not None:
        check_offsets(offsets.tolist(), y.shape[0], "combine", "routing.offsets")
    dtype = accumulate_dtype(y.dtype)
    of_result = y.dtype
    if bias is not None:
        y = y.to(dtype) + bias_rows(bias, offsets, y.shape[0])
    # Clamped indices must be valid even if there are no rows.
    if y.shape[0] == 0:
        y = torch.cat([y, y.new_zeros(1, y.shape[1])])
    weights_TK = None if weights is None else weights.to(dtype)
    total = torch.zeros(slot.shape[0], y.shape[1], dtype=dtype, device=y.device)
    for choice in range(slot.shape[1]):
        row = slot[:, choice]
        kept = row >= 0
        # Replace both factors for dropped choices: in the gradients, 0 times an infinity or NaN would be NaN.
        term = torch.where(kept[:, None], y[row.clamp(min=0).long()].to(dtype), 0)
        if weights_TK is not None:
            term = spread(weights_TK[:, choice], 1, term.shape[1]) * term
        total = torch.where(kept[:, None], total + term, total)
    return total.to(of_result)
