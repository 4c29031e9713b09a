"""combine: native gather and sum. Contract: :func:`pymoe.reference.combine`; kernel: csrc/kernels/combine.h.

For the gradient g of the result, the backward is one fused pass that computes the rows D(w, g) = ``w * g`` and the
inner products P(g, y) = ``<g, y>``. If a is the gradient of D and b that of P, the gradients of g, w and y are
combine(a, w) + combine(y, b), P(g, a) and D(b, g). So combine and this pass compute gradients of any order. A bias is
added to y wherever y is read, and its gradient is the sum of the gradient of y over each expert's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_combine
from pymoe._common.types import Routing, accumulate_dtype
from pymoe.ops import index_checks
from pymoe.ops.function_calls import call
from pymoe.ops.grouped_linear import BiasGrad
from pymoe.ops.row_moves import sum_choices
from pymoe.reference.combine import combine as reference

_COMBINE = torch.ops.pymoe.combine.default
COMBINE_BACKWARD = torch.ops.pymoe.combine_backward.default


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, weights: Tensor, slot: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        return _COMBINE(y, slot, weights, bias, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, weights, slot, offsets, bias = ctx.saved_tensors
        need_dy, need_dweights, _, _, need_dbias = ctx.needs_input_grad
        needs = (need_dy or need_dbias, need_dweights)
        dy, dweights = call(CombineBackward, grad.contiguous(), y, weights, slot, offsets, *needs, bias)
        return (
            dy if need_dy else None,
            dweights if need_dweights else None,
            None,
            None,
            call(BiasGrad, dy, offsets, None) if need_dbias else None,
        )


class CombineBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor,
        y: Tensor,
        weights: Tensor,
        slot: Tensor,
        offsets: Tensor,
        need_dy: bool,
        need_dweights: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return COMBINE_BACKWARD(grad, y, weights, slot, offsets, need_dy, need_dweights, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, _, _, bias = inputs
        ctx.save_for_backward(*tensors, bias)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, y, weights, slot, offsets, bias = ctx.saved_tensors
        need_grad, need_y, need_weights = ctx.needs_input_grad[:3]
        need_bias = ctx.needs_input_grad[7]
        dgrad = dy = dweights = dbias = None
        if need_grad:
            terms = []
            if a is not None:
                terms.append(call(Combine, a.contiguous(), weights, slot, offsets, None))
            if b is not None:
                terms.append(call(Combine, y, b.contiguous(), slot, offsets, bias))
            dgrad = sum(terms[1:], terms[0]) if terms else None
        if need_weights and a is not None:
            dweights = call(CombineBackward, grad, a.contiguous(), weights, slot, offsets, False, True, None)[1]
        if (need_y or need_bias) and b is not None:
            dy = call(CombineBackward, grad, y, b.contiguous(), slot, offsets, True, False, None)[0]
            dbias = call(BiasGrad, dy, offsets, None) if need_bias else None
        return dgrad, dy if need_y else None, dweights, None, None, None, None, dbias


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    check_combine(y, routing, weights, bias)
    index_checks.slots_in_range("combine", routing)
    if bias is not None:
        index_checks.offsets_in_range("combine", routing[2], y.shape[0], "routing.offsets")
    return raw(y, routing, weights, bias)


combine.__doc__ = reference.__doc__


def raw(y: Tensor, routing: Routing, weights: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return the result of :func:`combine`, without checks of the arguments."""
    if weights is None and bias is None:
        return sum_choices(y, routing)
    slot, _, offsets = routing
    wide = accumulate_dtype(y.dtype)
    if bias is not None:
        bias = bias.contiguous()
    if weights is None:
        weights = y.new_ones(slot.shape, dtype=wide)
    # This test is cheaper than a call of ``to`` that changes nothing.
    if weights.dtype != wide:
        weights = weights.to(wide)
    return call(  # type: ignore[no-any-return]
        Combine, y.contiguous(), weights.contiguous(), slot.contiguous(), offsets.contiguous(), bias
    )


@torch.library.register_fake("pymoe::combine")
def _(y: Tensor, slot: Tensor, *_: Any) -> Tensor:
    return y.new_empty((slot.shape[0], y.shape[1]))


@torch.library.register_fake("pymoe::combine_backward")
def _(
    grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor, offsets: Tensor, need_dy: bool, need_dweights: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return (
        y.new_empty(y.shape if need_dy else (0, y.shape[1])),
        weights.new_empty(weights.shape if need_dweights else (0, weights.shape[1])),
    )
