"""dispatch: native batch gather. Contract: :func:`pymoe.reference.dispatch`; kernel: csrc/kernels/dispatch.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.ops.combine import sum_choices
from pymoe.reference import dispatch as reference
from pymoe.reference.types import Routing


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, slot: Tensor, token: Tensor, offsets: Tensor) -> Tensor:
        return torch.ops.pymoe.dispatch(x, slot, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, slot, token, offsets = inputs
        ctx.save_for_backward(slot, token, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return sum_choices(grad, Routing(*ctx.saved_tensors)), None, None, None


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    reference.check(x, routing)
    slot, token, offsets = routing
    return _Dispatch.apply(x.contiguous(), slot.contiguous(), token.contiguous(), offsets.contiguous())


dispatch.__doc__ = reference.dispatch.__doc__


@torch.library.register_fake("pymoe::dispatch")
def _(x: Tensor, slot: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((slot.numel(), x.shape[1]))


@torch.library.register_fake("pymoe::dispatch_out")
def _(x: Tensor, slot: Tensor, offsets: Tensor, out: Tensor) -> None:
    return None
