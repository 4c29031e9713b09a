"""dispatch: the batch gather; rows of tokens become rows of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from pymoe.reference import checks
from pymoe.reference.fixed_steps import spread
from pymoe.reference.types import Routing


def check(x: Tensor, routing: Routing) -> None:
    """Raise if the arguments of :func:`dispatch` break its contract."""
    if _fits(x, routing):
        return
    checks.floating("dispatch", "x", x)
    checks.rank("dispatch", "x", x, "(T, H)")
    checks.routing("dispatch", routing, "x", x)
    checks.size("dispatch", "routing.slot", routing[0], 0, x.shape[0], "T of x")


def _fits(x: Tensor, routing: Routing) -> bool:
    return checks.is_matrix(x) and checks.is_routing(routing, x.device) and routing[0].shape[0] == x.shape[0]


def check_out(x: Tensor, routing: Routing, out: Tensor) -> None:
    """Raise if ``out`` is not a buffer that :func:`dispatch` may fill."""
    checks.dtype("dispatch", "out", out, x.dtype)
    checks.rank("dispatch", "out", out, "(S, H)")
    checks.size("dispatch", "out", out, 0, routing[1].shape[0], "S of routing.token")
    checks.size("dispatch", "out", out, 1, x.shape[1], "H of x")
    checks.same_device("dispatch", "out", out, "x", x)
    if not out.is_contiguous():
        raise ValueError(f"dispatch: out must be contiguous, got strides {out.stride()} for {tuple(out.shape)}")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        name = "x" if x.requires_grad else "out"
        raise ValueError(
            f"dispatch: out= has no gradient, but {name} requires one; call it without out=, or under torch.no_grad()"
        )
    if not torch.compiler.is_compiling() and _may_overlap(x, out):
        raise ValueError("dispatch: out must not overlap x in memory")


def _may_overlap(x: Tensor, out: Tensor) -> bool:
    """Return whether the memory ranges of the two tensors, from first to last element, overlap."""
    if x.numel() == 0 or out.numel() == 0:
        return False
    if x.is_meta or any(isinstance(one, FakeTensor) for one in (x, out)):  # they have no memory
        return False
    x_begin, out_begin = x.data_ptr(), out.data_ptr()
    x_reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    x_end = x_begin + (x_reach + 1) * x.element_size()
    return x_begin < out_begin + out.numel() * out.element_size() and out_begin < x_end


def dispatch(x: Tensor, routing: Routing, *, out: Tensor | None = None) -> Tensor:
    """Copy every token's row to the rows that its choices own.

    ``out[routing.slot[t, k]] = x[t]`` for every choice that was not dropped. Rows past ``routing.offsets[-1]`` are
    zero; earlier rows that no choice owns are unspecified. The copy is exact, for every dtype and every bit pattern.

    Args:
        x: (T, H), any floating dtype.
        routing: from :func:`build_routing` for the same T, or made by hand: ``slot`` names each row at most once.
        out: (S, H), contiguous, the dtype and device of ``x``, not overlapping it: a buffer to fill instead of fresh
            memory. Nothing is recorded for the backward, so neither tensor may require a gradient then (except under
            :func:`torch.no_grad`).

    Returns:
        (S, H), S = ``len(routing.token)``, the dtype of ``x``; ``out`` if it was given. Differentiable in ``x``:
        the gradient of a token is the sum over its choices, in the order of the choices (:func:`combine` without
        weights).

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a rank, size or device does not fit; ``out`` is not contiguous, overlaps ``x``, or a gradient
            would be lost in it.
        IndexError: a slot lies outside [-1, S).
    """
    check(x, routing)
    slot, token, _ = routing
    checks.slots_in_range("dispatch", routing)
    if out is not None:
        check_out(x, routing, out)
    # One copy for each choice, so that a token's gradients are added in the order of its choices.
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
