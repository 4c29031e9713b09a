"""combine: native gather and sum. Contract: :func:`pymoe.reference.combine`; kernel: csrc/kernels/combine.h.

The backward is one fused pass, which computes the rows D(w, g) = ``w * g`` and the products P(g, y) = ``<g, y>``. If a
is the gradient of D and b that of P, the gradients of g, w and y are combine(a, w) + combine(y, b), P(g, a) and
D(b, g). So the same two operators compute gradients of any order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_combine
from pymoe._common.dtypes import accumulate_dtype
from pymoe._common.types import Routing
from pymoe.ops import index_checks
from pymoe.ops.function_calls import call
from pymoe.ops.row_moves import sum_choices
from pymoe.reference.combine import combine as reference

_COMBINE = torch.ops.pymoe.combine.default
COMBINE_BACKWARD = torch.ops.pymoe.combine_backward.default


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, weights: Tensor, slot: Tensor, offsets: Tensor) -> Tensor:
        return _COMBINE(y, slot, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, weights, slot, offsets = ctx.saved_tensors
        need_dy, need_dweights = ctx.needs_input_grad[:2]
        dy, dweights = call(CombineBackward, grad.contiguous(), y, weights, slot, offsets, need_dy, need_dweights)
        return dy if need_dy else None, dweights if need_dweights else None, None, None


class CombineBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor, offsets: Tensor, need_dy: bool, need_dweights: bool
    ) -> tuple[Tensor, Tensor]:
        return COMBINE_BACKWARD(grad, y, weights, slot, offsets, need_dy, need_dweights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, y, weights, slot, offsets = ctx.saved_tensors
        need_grad, need_y, need_weights = ctx.needs_input_grad[:3]
        dgrad = dy = dweights = None
        if need_grad:
            terms = []
            if a is not None:
                terms.append(call(Combine, a.contiguous(), weights, slot, offsets))
            if b is not None:
                terms.append(call(Combine, y, b.contiguous(), slot, offsets))
            dgrad = sum(terms[1:], terms[0]) if terms else None
        if need_weights and a is not None:
            dweights = call(CombineBackward, grad, a.contiguous(), weights, slot, offsets, False, True)[1]
        if need_y and b is not None:
            dy = call(CombineBackward, grad, y, b.contiguous(), slot, offsets, True, False)[0]
        return dgrad, dy, dweights, None, None, None, None


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    check_combine(y, routing, weights)
    index_checks.slots_in_range("combine", routing)
    return raw(y, routing, weights)


combine.__doc__ = reference.__doc__


def raw(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Return the result of :func:`combine`, without checks of the arguments."""
    if weights is None:
        return sum_choices(y, routing)
    slot, _, offsets = routing
    wide = accumulate_dtype(y.dtype)
    if weights.dtype != wide:  # this test is cheaper than a call of `to` that changes nothing
        weights = weights.to(wide)
    return call(Combine, y.contiguous(), weights.contiguous(), slot.contiguous(), offsets.contiguous())  # type: ignore[no-any-return]


@torch.library.register_fake("pymoe::combine")
def _(y: Tensor, slot: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty((slot.shape[0], y.shape[1]))


@torch.library.register_fake("pymoe::combine_backward")
def _(
    grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor, offsets: Tensor, need_dy: bool, need_dweights: bool
) -> tuple[Tensor, Tensor]:
    return (
        y.new_empty(y.shape if need_dy else (0, y.shape[1])),
        weights.new_empty(weights.shape if need_dweights else (0, weights.shape[1])),
    )
