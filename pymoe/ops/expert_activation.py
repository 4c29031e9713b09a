"""expert_activation: fused forward and backward.

Contract: :func:`pymoe.reference.expert_activation`; kernel: csrc/kernels/expert_activation.h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe.ops.function_calls import call
from pymoe.ops.transforms import gradients_again
from pymoe.reference.expert_activation import KINDS, check
from pymoe.reference.expert_activation import expert_activation as reference
from pymoe.reference.types import ActivationKind


def _activated(h: Tensor, kind: str) -> Tensor:
    """Compute what the kernel does, with torch operators."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    if kind == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (F.silu(gate) * up).to(h.dtype)
    return (F.gelu(wide) if kind == "gelu" else F.relu(wide)).to(h.dtype)


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
            return gradients_again(lambda values: _activated(values, KINDS[ctx.kind]), (h,), grad)[0], None
        return torch.ops.pymoe.expert_activation_backward(grad.contiguous(), h, ctx.kind), None


def expert_activation(h: Tensor, kind: ActivationKind) -> Tensor:
    check(h, kind)
    return call(_ExpertActivation, h.contiguous(), KINDS.index(kind))


expert_activation.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::expert_activation")
def _(h: Tensor, kind: int) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2 if KINDS[kind] == "swiglu" else h.shape[1]))


@torch.library.register_fake("pymoe::expert_activation_backward")
def _(grad: Tensor, h: Tensor, kind: int) -> Tensor:
    return h.new_empty(h.shape)
