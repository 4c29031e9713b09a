"""Spreads tokens' rows to their choices (dispatch) and sums the choices' rows (combine without weights).

The backward of each function is the other function, so both are differentiable any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import Routing
from pymoe.ops.function_calls import call

_DISPATCH = torch.ops.pymoe.dispatch.default
COMBINE = torch.ops.pymoe.combine.default


class _MovesRows(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, slot, token, offsets = inputs
        ctx.save_for_backward(slot, token, offsets)


class SpreadRows(_MovesRows):
    @staticmethod
    def forward(x: Tensor, slot: Tensor, token: Tensor, offsets: Tensor) -> Tensor:
        return _DISPATCH(x, slot, offsets, token.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return sum_choices(grad, Routing(*ctx.saved_tensors)), None, None, None


class SumChoices(_MovesRows):
    @staticmethod
    def forward(rows: Tensor, slot: Tensor, token: Tensor, offsets: Tensor) -> Tensor:
        return COMBINE(rows, slot, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return spread_rows(grad, Routing(*ctx.saved_tensors)), None, None, None


def spread_rows(x: Tensor, routing: Routing) -> Tensor:
    """Return ``dispatch(x, routing)``, (S, H) for ``x`` (T, H), without checks of the arguments."""
    slot, token, offsets = routing
    return call(SpreadRows, x.contiguous(), slot.contiguous(), token.contiguous(), offsets.contiguous())


def sum_choices(rows: Tensor, routing: Routing) -> Tensor:
    """Return ``combine(rows, routing)``, (T, H) for ``rows`` (S, H), without checks of the arguments."""
    slot, token, offsets = routing
    return call(SumChoices, rows.contiguous(), slot.contiguous(), token.contiguous(), offsets.contiguous())
