"""router_losses: native auxiliary losses of a router.

Contract: :func:`pymoe.reference.router_losses`; kernels: csrc/kernels/router_losses.h. Forward and backward are each
one fused pass over the logits. The backward's own gradient, which is rarely needed, is computed by torch operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_logits, check_router_losses
from pymoe._common.types import RouterLosses, Score, accumulate_dtype
from pymoe.ops.function_calls import call
from pymoe.ops.transforms import gradients_again
from pymoe.reference.router_losses import load_balancing_loss as reference_load_balancing_loss
from pymoe.reference.router_losses import router_losses as reference_router_losses
from pymoe.reference.router_losses import router_z_loss as reference_router_z_loss
from pymoe.reference.scores import SUM_FLOOR

_ROUTER_LOSSES = torch.ops.pymoe.router_losses.default
_ROUTER_LOSSES_BACKWARD = torch.ops.pymoe.router_losses_backward.default


class _RouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, load: Tensor | None, score: Score, with_z: bool) -> tuple[Tensor, Tensor]:
        return _ROUTER_LOSSES(logits, load, score, with_z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, load, *ctx.options = inputs
        ctx.save_for_backward(logits, load)

    @staticmethod
    def backward(ctx: Any, grad_balance: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = grad_balance.contiguous(), grad_z.contiguous()
        return call(_RouterLossesBackward, *grads, *ctx.saved_tensors, *ctx.options), None, None, None


class _RouterLossesBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad_balance: Tensor, grad_z: Tensor, logits: Tensor, load: Tensor | None, score: Score, with_z: bool
    ) -> Tensor:
        return _ROUTER_LOSSES_BACKWARD(grad_balance, grad_z, logits, load, score, with_z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad_balance, grad_z, logits, load, *ctx.options = inputs
        ctx.save_for_backward(grad_balance, grad_z, logits, load)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_balance, grad_z, logits, load = ctx.saved_tensors

        def first(grad_balance: Tensor, grad_z: Tensor, logits: Tensor) -> Tensor:
            def loss(values: Tensor) -> Tensor:
                return _weighted_sum(grad_balance, grad_z, values, load, *ctx.options)

            return gradients_again(loss, (logits,), torch.ones_like(grad_z))[0]

        return *gradients_again(first, (grad_balance, grad_z, logits), cotangent), None, None, None


def _weighted_sum(
    grad_balance: Tensor, grad_z: Tensor, logits: Tensor, load: Tensor | None, score: Score, with_z: bool
) -> Tensor:
    """Return ``grad_balance * balance(logits) + grad_z * z(logits)``, computed with torch operators."""
    values = logits.to(accumulate_dtype(logits.dtype))
    tokens, num_experts = values.shape
    total = values.new_zeros(())
    if with_z:
        total = total + grad_z * torch.logsumexp(values, dim=1).square().sum() / max(tokens, 1)
    if load is not None:
        if score == "softmax":
            probabilities = torch.softmax(values, dim=1)
        else:
            scores = torch.sigmoid(values)
            probabilities = scores / scores.sum(dim=1, keepdim=True).clamp(min=SUM_FLOOR)
        fraction = load.to(values.dtype) / load.sum().clamp(min=1).to(values.dtype)
        total = total + grad_balance * num_experts * (probabilities.sum(dim=0) * fraction).sum() / max(tokens, 1)
    return total


def router_losses_backward(grad_balance: Tensor, grad_z: Tensor, logits: Tensor, load: Tensor, score: Score) -> Tensor:
    """Return the gradient of ``logits`` (T, E), given the gradients of both losses; the arguments are not checked."""
    return call(_RouterLossesBackward, grad_balance, grad_z, logits, load, score, True)  # type: ignore[no-any-return]


def router_losses(logits: Tensor, load: Tensor, *, score: Score = "softmax") -> RouterLosses:
    check_router_losses("router_losses", logits, load, score)
    return RouterLosses(*call(_RouterLosses, logits.contiguous(), load.contiguous(), score, True))


def load_balancing_loss(logits: Tensor, load: Tensor, *, score: Score = "softmax") -> Tensor:
    check_router_losses("load_balancing_loss", logits, load, score)
    return call(_RouterLosses, logits.contiguous(), load.contiguous(), score, False)[0]


def router_z_loss(logits: Tensor) -> Tensor:
    check_logits("router_z_loss", logits)
    return call(_RouterLosses, logits.contiguous(), None, "softmax", True)[1]


router_losses.__doc__ = reference_router_losses.__doc__
load_balancing_loss.__doc__ = reference_load_balancing_loss.__doc__
router_z_loss.__doc__ = reference_router_z_loss.__doc__


@torch.library.register_fake("pymoe::router_losses")
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((), dtype=dtype)


@torch.library.register_fake("pymoe::router_losses_backward")
def _(grad_balance: Tensor, grad_z: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
