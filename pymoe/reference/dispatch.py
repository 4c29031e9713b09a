"""dispatch: copies each token's row to the rows of its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe._common.contracts import check_dispatch, check_dispatch_out
from pymoe._common.types import Routing
from pymoe.reference.fixed_steps import spread


def dispatch(x: Tensor, routing: Routing, *, out: Tensor | None = None) -> Tensor:
    """Copy every token's row to the rows that its choices own.

    ``out[routing.slot[t, k]] = x[t]`` for every choice that was not dropped. Rows past ``routing.offsets[-1]`` are
    zero; earlier rows that no choice owns are unspecified. The copy is exact, for every dtype and every bit pattern.

    Args:
        x: (T, H), any floating dtype.
        routing: from :func:`build_routing` for the same T, or made by hand: ``slot`` names only rows before
            ``offsets[-1]``, each at most once; ``token`` is -1 for the rows from there on.
        out: (S, H), contiguous, with the dtype and device of ``x``, not overlapping ``x``: a buffer to fill instead of
            fresh memory. No backward is recorded, so neither ``x`` nor ``out`` may require a gradient (except under
            :func:`torch.no_grad`).

    Returns:
        (S, H), S = ``len(routing.token)``, the dtype of ``x``; ``out`` if it was given. Differentiable in ``x``:
        the gradient of a token is the sum over its choices, in the order of the choices (:func:`combine` without
        weights).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size or device does not fit; ``out`` is not contiguous, overlaps ``x``, or a gradient
            (with the native operator also a tangent of forward mode) would be lost in it.
        IndexError: a slot lies outside [-1, S).

    Example:
        >>> x, experts = torch.tensor([[1.0], [10.0]]), torch.tensor([[2, 0], [0, 1]], dtype=torch.int32)
        >>> pymoe.ops.dispatch(x, pymoe.ops.build_routing(experts, 3)).flatten()  # experts 0, 0, 1, 2
        tensor([ 1., 10., 10.,  1.])
    """
    check_dispatch(x, routing)
    slot, token, _ = routing
    checks.slots_in_range("dispatch", routing)
    if out is not None:
        check_dispatch_out(x, routing, out)
    # Make a copy for each choice, so that a token's gradients are added in the order of its choices.
    copies_SH = spread(x, 1, slot.shape[1], in_order=True).flatten(0, 1)
    slot_S = slot.reshape(-1)
    kept = slot_S >= 0
    choice_of_row = torch.zeros_like(token, dtype=torch.int64)
    choice_of_row[slot_S[kept].long()] = kept.nonzero()[:, 0]
    if slot_S.shape[0] == 0:
        rows = torch.cat([x[:0], x.new_zeros(token.shape[0], x.shape[1])])
    else:
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        rows = torch.where(token[:, None] >= 0, copies_SH[choice_of_row], zero)
    return rows if out is None else out.copy_(rows)
