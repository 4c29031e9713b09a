"""dispatch: native batch gather. Contract: :func:`pymoe.reference.dispatch`; kernel: csrc/kernels/dispatch.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe import _torch_canaries as canaries
from pymoe._common.contracts import check_dispatch, check_dispatch_out
from pymoe._common.types import Routing
from pymoe._torch_private import after_ADInplaceOrView_keyset
from pymoe._transforms import has_tangent
from pymoe.ops import index_checks
from pymoe.ops.row_moves import spread_rows
from pymoe.reference.dispatch import dispatch as reference


def dispatch(x: Tensor, routing: Routing, *, out: Tensor | None = None) -> Tensor:
    check_dispatch(x, routing)
    index_checks.slots_in_range("dispatch", routing)
    if out is None:
        return spread_rows(x, routing)
    if isinstance(out, Tensor) and has_tangent(x, out):
        raise ValueError("dispatch: out= has no tangent, but x or out may carry one; call it without out=")
    check_dispatch_out(x, routing, out)
    if not torch.compiler.is_compiling():
        _edits_are_counted()
    slot, _, offsets = routing
    torch.ops.pymoe.dispatch_out(x.detach().contiguous(), slot.contiguous(), offsets.contiguous(), out)
    return out


dispatch.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::dispatch")
def _(x: Tensor, slot: Tensor, offsets: Tensor, rows: int | None = None) -> Tensor:
    return x.new_empty((slot.numel() if rows is None else rows, x.shape[1]))


@torch.library.register_fake("pymoe::dispatch_out")
def _(x: Tensor, slot: Tensor, offsets: Tensor, out: Tensor) -> None:
    return None


# Kernels that are registered through this object stay registered as long as it lives.
_LIBRARY = torch.library.Library("pymoe", "IMPL")


def _count_change(keys: Any, x: Tensor, slot: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Run the operator, and increment the version of ``out``, as in-place operators do.

    A backward pass then raises if it needs the previous values of ``out``.
    """
    torch.autograd.graph.increment_version(out)
    below = keys & after_ADInplaceOrView_keyset
    torch.ops.pymoe.dispatch_out.default.redispatch(below, x, slot, offsets, out)


_LIBRARY.impl("dispatch_out", _count_change, "ADInplaceOrView", with_keyset=True)


@canaries.canary
def _edits_are_counted() -> canaries.Exercises:
    """Exercise the private names of torch through which autograd learns that dispatch(out=) writes to a tensor."""
    x, out = (torch.full((1, 1), value, dtype=torch.float64, device="cpu") for value in (1.0, 0.0))
    slot, offsets = (torch.tensor(values, dtype=torch.int32, device="cpu") for values in ([[0]], [0, 1]))
    before = out._version
    torch.ops.pymoe.dispatch_out(x, slot, offsets, out)
    yield "after_ADInplaceOrView_keyset", out._version == before + 1 and out.item() == 1
