"""dispatch: the batch gather, rows of tokens to rows of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe.reference import checks
from pymoe.reference.types import Routing


def check(x: Tensor, routing: Routing) -> None:
    """Raise if the arguments of :func:`dispatch` break its contract."""
    checks.floating("dispatch", "x", x)
    checks.rank("dispatch", "x", x, "(T, H)")
    checks.routing("dispatch", routing, "x", x)
    checks.size("dispatch", "routing.slot", routing[0], 0, x.shape[0], "T of x")


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Copy every token's row to the rows that its choices own.

    ``out[routing.slot[t, k]] = x[t]`` for every choice that was not dropped; rows past ``routing.offsets[-1]`` are
    zero. The copy is exact, for every dtype and every bit pattern.

    Args:
        x: (T, H), any floating dtype.
        routing: from :func:`build_routing` for the same T.

    Returns:
        (S, H) with S = T * K, the dtype of ``x``. Differentiable in ``x``: the gradient of a token is the sum over
        its choices, in the order of the choices (:func:`combine` without weights).

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a rank, size or device does not fit.
        IndexError: a slot lies outside [-1, S).
    """
    check(x, routing)
    slot, token, _ = routing
    checks.slots_in_range("dispatch", slot)
    rows = x[token.clamp(min=0).long()]
    return torch.where(token[:, None] >= 0, rows, torch.zeros((), dtype=x.dtype, device=x.device))
