"""router_losses: native auxiliary losses of a router.

Contract: :func:`pymoe.reference.router_losses`; kernels: csrc/kernels/router_losses.h. Forward and backward are one
fused pass over the logits each. The backward's own gradient is rarely needed and computed by torch operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.reference.router_losses import check, check_logits
from pymoe.reference.router_losses import load_balancing_loss as reference_load_balancing_loss
from pymoe.reference.router_losses import router_losses as reference_router_losses
from pymoe.reference.router_losses import router_z_loss as reference_router_z_loss
from pymoe.reference.scores import SUM_FLOOR, accumulate_dtype
from pymoe.reference.types import RouterLosses, Score


class _RouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, load: Tensor | None, score: Score, with_z: bool) -> tuple[Tensor, Tensor]:
        return torch.ops.pymoe.router_losses(logits, load, score, with_z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, load, *ctx.options = inputs
        ctx.save_for_backward(logits, load)

    @staticmethod
    def backward(ctx: Any, grad_balance: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = grad_balance.contiguous(), grad_z.contiguous()
        return _RouterLossesBackward.apply(*grads, *ctx.saved_tensors, *ctx.options), None, None, None


class _RouterLossesBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad_balance: Tensor, grad_z: Tensor, logits: Tensor, load: Tensor | None, score: Score, with_z: bool
    ) -> Tensor:
        return torch.ops.pymoe.router_losses_backward(grad_balance, grad_z, logits, load, score, with_z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad_balance, grad_z, logits, load, *ctx.options = inputs
        ctx.save_for_backward(grad_balance, grad_z, logits, load)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_second_gradients(cotangent, *ctx.saved_tensors, *ctx.options), None, None, None


def _second_gradients(
    cotangent: Tensor,
    grad_balance: Tensor,
    grad_z: Tensor,
    logits: Tensor,
    load: Tensor | None,
    score: Score,
    with_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``<cotangent, grad_balance * balance'(logits) + grad_z * z'(logits)>`` for its arguments.

    With c = cotangent, p the probabilities and v the change of a token's terms along c; differentiable again.
    """
    dtype = accumulate_dtype(logits.dtype)
    l_TE, c_TE = logits.to(dtype), cotangent.to(dtype)
    tokens, num_experts = l_TE.shape
    d_balance, d_z = torch.zeros_like(grad_balance), torch.zeros_like(grad_z)
    d_logits = torch.zeros_like(l_TE)
    p_TE = torch.softmax(l_TE, dim=1)
    if with_z:
        # z' . c = 2 / T sum_t lse <p, c>, where the derivatives of lse and <p, c> are p and p (c - <p, c>).
        lse, along = torch.logsumexp(l_TE, dim=1, keepdim=True), (p_TE * c_TE).sum(dim=1, keepdim=True)
        d_z = 2 * (lse * along).sum() / max(tokens, 1)
        d_logits = d_logits + 2 * grad_z / max(tokens, 1) * p_TE * (along + lse * (c_TE - along))
    if load is not None:
        f_E = num_experts / max(tokens, 1) * load.to(dtype) / load.sum().clamp(min=1).to(dtype)
        if score == "softmax":
            # balance' . c = sum_t <p (c - <p, c>), f> = sum_t <p, c f> - <p, c> <p, f>.
            pc, pf = (p_TE * c_TE).sum(dim=1, keepdim=True), (p_TE * f_E).sum(dim=1, keepdim=True)
            terms = c_TE * f_E - pc * f_E - c_TE * pf
            d_balance = (p_TE * c_TE * f_E).sum() - (pc * pf).sum()
            d_logits = d_logits + grad_balance * p_TE * (terms - (p_TE * terms).sum(dim=1, keepdim=True))
        else:
            # balance' . c = sum_t <s', f> / S - <s, f> <s', 1> / S^2, with s' = s (1 - s) c; S constant if floored.
            s_TE = torch.sigmoid(l_TE)
            ds_TE = s_TE * (1 - s_TE) * c_TE
            total = s_TE.sum(dim=1, keepdim=True)
            counts = (total >= SUM_FLOOR).to(dtype)
            total = total.clamp(min=SUM_FLOOR)
            sf, dsf = (s_TE * f_E).sum(dim=1, keepdim=True) / total, (ds_TE * f_E).sum(dim=1, keepdim=True) / total
            d1 = ds_TE.sum(dim=1, keepdim=True) / total * counts
            d_balance = (dsf - sf * d1).sum()
            h_ds = (f_E - sf * counts) / total
            h_s = (-d1 * f_E - counts * (dsf - 2 * sf * d1)) / total
            d_logits = d_logits + grad_balance * (h_s + h_ds * (1 - 2 * s_TE) * c_TE) * s_TE * (1 - s_TE)
    return d_balance, d_z, d_logits.to(logits.dtype)


def router_losses(logits: Tensor, load: Tensor, *, score: Score = "softmax") -> RouterLosses:
    check("router_losses", logits, load, score)
    return RouterLosses(*_RouterLosses.apply(logits.contiguous(), load.contiguous(), score, True))


def load_balancing_loss(logits: Tensor, load: Tensor, *, score: Score = "softmax") -> Tensor:
    check("load_balancing_loss", logits, load, score)
    return _RouterLosses.apply(logits.contiguous(), load.contiguous(), score, False)[0]


def router_z_loss(logits: Tensor) -> Tensor:
    check_logits("router_z_loss", logits)
    return _RouterLosses.apply(logits.contiguous(), None, "softmax", True)[1]


router_losses.__doc__ = reference_router_losses.__doc__
load_balancing_loss.__doc__ = reference_load_balancing_loss.__doc__
router_z_loss.__doc__ = reference_router_z_loss.__doc__


@torch.library.register_fake("pymoe::router_losses")
def _(logits: Tensor, load: Tensor | None, score: Score, with_z: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((), dtype=dtype)


@torch.library.register_fake("pymoe::router_losses_backward")
def _(grad_balance: Tensor, grad_z: Tensor, logits: Tensor, load: Tensor | None, score: Score, with_z: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
