"""expert_activation: fused forward and backward.

Contract: :func:`pymoe.reference.expert_activation`; kernel: csrc/kernels/expert_activation.h.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pymoe.reference.expert_activation import KINDS, check
from pymoe.reference.expert_activation import expert_activation as reference
from pymoe.reference.types import ActivationKind


def _differentiable_gradient(grad: Tensor, h: Tensor, kind: int) -> Tensor:
    """Compute what the backward kernel does, with torch operators that autograd can differentiate again."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    wide_grad = grad.to(wide.dtype)
    name = KINDS[kind]
    if name == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        sigmoid = gate.sigmoid()
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((wide_grad * up * slope, wide_grad * (gate * sigmoid)), dim=1).to(h.dtype)
    if name == "gelu":
        distribution = 0.5 * torch.erfc(wide * -math.sqrt(0.5))
        density = torch.exp(wide * wide * -0.5) * (1 / math.sqrt(2 * math.pi))
        return (wide_grad * (distribution + wide * density)).to(h.dtype)
    return torch.where(wide <= 0, 0.0, wide_grad).to(h.dtype)


class _ExpertActivation(torch.autograd.Function):
    @staticmethod
    def forward(h: Tensor, kind: int) -> Tensor:
        return torch.ops.pymoe.expert_activation(h, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        h, ctx.kind = inputs
        ctx.save_for_backward(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (h,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_gradient(grad, h, ctx.kind), None
        return torch.ops.pymoe.expert_activation_backward(grad.contiguous(), h, ctx.kind), None


def expert_activation(h: Tensor, kind: ActivationKind) -> Tensor:
    check(h, kind)
    return _ExpertActivation.apply(h.contiguous(), KINDS.index(kind))


expert_activation.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::expert_activation")
def _(h: Tensor, kind: int) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2 if KINDS[kind] == "swiglu" else h.shape[1]))


@torch.library.register_fake("pymoe::expert_activation_backward")
def _(grad: Tensor, h: Tensor, kind: int) -> Tensor:
    return h.new_empty(h.shape)
